//! Where the kernel moves no pages, every reply is written from a buffer.

use std::os::fd::OwnedFd;

use fuser::{ReplyData, RequestId};

use crate::extent::Sink;

/// No pipes.
#[derive(Debug)]
pub struct Splicing;

impl Splicing {
    /// No pipes for so many threads.
    pub fn new(_threads: usize) -> Splicing {
        Splicing
    }

    /// The kernel's own limit does.
    pub fn longest_request(&self) -> Option<usize> {
        None
    }

    /// Does nothing.
    pub fn begin(&self, _device: OwnedFd) {}

    /// Gives the reply back.
    pub fn answer(
        &self,
        _request: RequestId,
        _size: usize,
        reply: ReplyData,
        _send: impl FnOnce(&mut dyn Sink) -> Option<usize>,
    ) -> Option<ReplyData> {
        Some(reply)
    }
}
