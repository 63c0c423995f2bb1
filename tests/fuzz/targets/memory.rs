//! An allocator that counts, and how much a target may allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, with the bytes that are allocated and the most that were.
pub struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn grow(size: usize) {
    MOST.fetch_max(NOW.fetch_add(size, Relaxed) + size, Relaxed);
}

// SAFETY: all calls go to the system's allocator as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be there while the bytes are moved.
        grow(size);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.realloc(place, layout, size) }
    }
}

/// What any target may allocate at a time: the buffers of an import's threads and of a store's caches, and a small
/// multiple of the input.
pub fn limit(input: usize) -> usize {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    (8 << 20) + threads * (2 << 20) + 200 * input
}

/// Runs a target and panics if it allocates more than its limit at a time.
pub fn within_limit(target: super::Target, input: &[u8]) {
    let before = NOW.load(Relaxed);
    MOST.store(before, Relaxed);
    target(input);
    let most = MOST.load(Relaxed).saturating_sub(before);
    assert!(most <= limit(input.len()), "{most} bytes are allocated at a time for an input of {}", input.len());
}
