//! How the kernel reads the files that it does not read past us ([`super::passthrough`]).

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use fuser::FopenFlags;

/// How files are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// As is best for each file.
    #[default]
    Auto,
    /// All through the page cache.
    Cache,
    /// All but mapped pages past the page cache.
    Direct,
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(word: &str) -> Result<Mode, String> {
        match word {
            "auto" => Ok(Mode::Auto),
            "cache" => Ok(Mode::Cache),
            "direct" => Ok(Mode::Direct),
            _ => Err("it is one of auto, cache, direct".into()),
        }
    }
}

/// The choice for each open, made of what is known by then.
#[derive(Debug, Default)]
pub struct ReadPath {
    mode: Mode,
    direct_maps: AtomicBool,
}

impl ReadPath {
    /// A choice of this mode.
    pub fn new(mode: Mode) -> ReadPath {
        ReadPath { mode, direct_maps: AtomicBool::new(false) }
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Says that files opened for direct I/O can be mapped, without which none is opened so.
    pub fn direct_can_be_mapped(&self) {
        self.direct_maps.store(true, Ordering::Relaxed);
    }

    /// How to open a file.
    pub fn flags(&self) -> FopenFlags {
        let direct = self.mode == Mode::Direct && self.direct_maps.load(Ordering::Relaxed);
        let cached = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
        if direct { FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_NOFLUSH } else { cached }
    }
}
