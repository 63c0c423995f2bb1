//! What a layout or variant costs: bytes read from blobs, bytes produced, time spent computing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

use crate::digest::Digest;
use crate::error::Result;
use crate::extent::{Blobs, Sink};
use crate::layout;

/// The counters of one layout or variant since the mount began.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    reads: AtomicU64,
    bytes: AtomicU64,
    blob_bytes: AtomicU64,
    sent_bytes: AtomicU64,
    compute_nanos: AtomicU64,
    preparations: AtomicU64,
    fallbacks: AtomicU64,
}

impl Counters {
    /// Counts a read of so many bytes.
    pub fn read(&self, bytes: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a read of so many bytes that did not come to this process.
    pub fn sent(&self, bytes: usize) {
        self.read(bytes);
        self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a file or model that was wanted computed and could not be had so.
    pub fn fallback(&self) {
        self.fallbacks.fetch_add(1, Ordering::Relaxed);
    }

    fn json(&self, is_variant: bool) -> Value {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (bytes, blob_bytes) = (count(&self.bytes), count(&self.blob_bytes));
        let (reads, sent_bytes) = (count(&self.reads), count(&self.sent_bytes));
        let mut counted = json!({"reads": reads, "bytes": bytes, "blob_bytes": blob_bytes, "sent_bytes": sent_bytes});
        if let (true, Some(counted)) = (is_variant, counted.as_object_mut()) {
            let ratio = (bytes > 0).then(|| (blob_bytes as f64 / bytes as f64 * 1000.0).round() / 1000.0);
            counted.insert("ratio".into(), json!(ratio));
            counted.insert("compute_seconds".into(), json!(count(&self.compute_nanos) as f64 / 1e9));
            counted.insert("preparations".into(), json!(count(&self.preparations)));
            counted.insert("fallbacks".into(), json!(count(&self.fallbacks)));
        }
        counted
    }
}

/// The counters of all layouts and variants.
#[derive(Debug)]
pub(crate) struct Meters([Vec<Counters>; layout::COUNT]);

impl Default for Meters {
    fn default() -> Meters {
        Meters(layout::all().map(|layout| (0..=layout.variants().len()).map(|_| Counters::default()).collect()))
    }
}

impl Meters {
    /// The counters of a layout or one of its variants, by index.
    pub fn of(&self, layout: usize, variant: Option<usize>) -> &Counters {
        &self.0[layout][variant.map_or(0, |variant| variant + 1)]
    }

    /// Reads and bytes of all together.
    pub fn total(&self) -> (u64, u64) {
        let sum = |pick: fn(&Counters) -> &AtomicU64| {
            self.0.iter().flatten().map(|counters| pick(counters).load(Ordering::Relaxed)).sum()
        };
        (sum(|counters| &counters.reads), sum(|counters| &counters.bytes))
    }

    /// By name; variants that nobody has touched are left out.
    pub fn json(&self) -> serde_json::Map<String, Value> {
        let mut all = serde_json::Map::new();
        for (layout, counters) in layout::all().into_iter().zip(&self.0) {
            all.insert(layout.name().into(), counters[0].json(false));
            for ((variant, _), counters) in layout.variants().iter().zip(&counters[1..]) {
                let touched = [&counters.reads, &counters.preparations, &counters.fallbacks];
                if touched.iter().any(|counter| counter.load(Ordering::Relaxed) > 0) {
                    all.insert(format!("{}@{variant}", layout.name()), counters.json(true));
                }
            }
        }
        all
    }
}

/// Blobs whose reads are counted.
pub(crate) struct Metered<'a> {
    blobs: &'a dyn Blobs,
    counters: &'a Counters,
    /// Since when, and how long was waited for blobs; only where computing is to be told from reading.
    clock: Option<(Instant, AtomicU64)>,
}

impl<'a> Metered<'a> {
    pub fn new(blobs: &'a dyn Blobs, counters: &'a Counters, is_variant: bool) -> Self {
        Metered { blobs, counters, clock: is_variant.then(|| (Instant::now(), AtomicU64::new(0))) }
    }
}

impl Blobs for Metered<'_> {
    fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
        let started = self.clock.as_ref().map(|_| Instant::now());
        self.blobs.read_exact(digest, offset, buf)?;
        if let (Some((_, waited)), Some(started)) = (&self.clock, started) {
            waited.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        self.counters.blob_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn send(&self, digest: &Digest, offset: u64, len: usize, sink: &mut dyn Sink) -> Option<()> {
        self.blobs.send(digest, offset, len, sink)?;
        self.counters.blob_bytes.fetch_add(len as u64, Ordering::Relaxed);
        Some(())
    }

    fn memo(&self, key: &str, digest: &Digest, make: &dyn Fn() -> Result<Vec<u8>>) -> Result<Arc<[u8]>> {
        self.blobs.memo(key, digest, &|| {
            self.counters.preparations.fetch_add(1, Ordering::Relaxed);
            make()
        })
    }
}

impl Drop for Metered<'_> {
    fn drop(&mut self) {
        if let Some((started, waited)) = &self.clock {
            let whole = started.elapsed().as_nanos() as u64;
            // Surveys read on several threads at once: their waits may add up to more than the time that passed.
            let computing = whole.saturating_sub(waited.load(Ordering::Relaxed));
            self.counters.compute_nanos.fetch_add(computing, Ordering::Relaxed);
        }
    }
}
