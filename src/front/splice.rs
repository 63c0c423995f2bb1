//! Large replies whose bytes never come to this process: the kernel moves the pages of a blob through a pipe into the
//! reply, and copies them once, into the reader's pages or memory. With a buffer of ours between they are copied twice.
//!
//! Nothing is lost by it: a blob that is cut off gives fewer bytes than were asked for, a disk that fails gives an error,
//! and the request is then served from the buffer, which tells of the fault. A blob that is cut off within a page in the
//! moment between the pipe and the reply shows zeros to that page's end, as to any reader whom that befalls.
//!
//! A pipe holds as many pieces of pages as it has slots, and has no more of them than `fs.pipe-max-size` has pages (256,
//! where nobody changed it) without CAP_SYS_RESOURCE, which root lacks in many containers. A request of 1 MiB begins and ends
//! within a page of the blob and would need 258. So root's mount has requests of half that length. They are no slower: four
//! threads of 32 MiB preads read 7.7 GB/s past the page cache so, and 5.9 with requests of 1 MiB and pipes that hold them.
//!
//! Kernels from 5.8 on that lack a mend of 2022 (CVE-2022-0847) take bytes written to a pipe into the page of a file that was
//! spliced before them: the blob, in the page cache, would be another one. Which of them have the mend their version does
//! not say, so replies are spliced from 5.17 on, which all have it.
//!
//! An ordinary user has few slots for all pipes together, and requests of 128 KiB, which is how far the kernel reads ahead for
//! him: his pipes are smaller, and what does not fit is copied.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use crossbeam_queue::ArrayQueue;
use fuser::{ReplyData, RequestId};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice};

use super::{machine, sys};
use crate::extent::Sink;

/// Replies that have at least this length in bytes are spliced.
const LEAST: usize = 64 << 10;
/// Pieces that have less than this length on the average are quicker to read.
const LEAST_PIECE: usize = 32 << 10;
/// Longest request where replies of that length can be spliced; the kernel's own limit is 1 MiB.
const LONGEST: usize = 512 << 10;
/// Size of root's pipes, in bytes of whole pages: room for such a request in many pieces.
const ROOM: usize = 1 << 20;
/// The same for an ordinary user, and the least that is of use: room for a request of 128 KiB.
const LEAST_ROOM: usize = 256 << 10;
/// The first version of the kernel all of whose releases keep what is written to a pipe out of spliced files.
const SAFE_KERNEL: (u32, u32) = (5, 17);
/// Pipes at the most. Each takes 10 KiB.
const PIPES: usize = 32;
const PAGE: usize = 4096;
/// `struct fuse_out_header`: length, error, and the request's number.
const HEADER: usize = 16;

/// The pipes, and where they lead.
#[derive(Debug)]
pub struct Splicing {
    pipes: ArrayQueue<Pipe>,
    device: OnceLock<OwnedFd>,
}

#[derive(Debug)]
struct Pipe {
    from: File,
    into: File,
    slots: usize,
}

impl Splicing {
    /// A pipe for each of so many threads, if they are not very many. Where there are none to be had, or the kernel is none
    /// to trust with it, no reply is spliced.
    pub fn new(threads: usize) -> Splicing {
        let pipes = ArrayQueue::new(threads.clamp(1, PIPES));
        let is_safe = machine::kernel() >= SAFE_KERNEL;
        while is_safe && !pipes.is_full() {
            match Pipe::new() {
                Ok(pipe) if pipe.slots * PAGE >= LEAST_ROOM => drop(pipes.push(pipe)),
                _ => break,
            }
        }
        Splicing { pipes, device: OnceLock::new() }
    }

    /// How long requests may be so that all replies can be spliced, if the kernel is to be told.
    pub fn longest_request(&self) -> Option<usize> {
        let pipe = self.pipes.pop()?;
        let room = pipe.slots * PAGE;
        let _ = self.pipes.push(pipe);
        (room >= ROOM).then_some(LONGEST)
    }

    /// From now on replies go to this device.
    pub fn begin(&self, device: OwnedFd) {
        // There is one session, and one device.
        let _ = self.device.set(device);
    }

    /// Answers a request with what `send` sends. If it could not, the reply comes back.
    pub fn answer(
        &self,
        request: RequestId,
        size: usize,
        reply: ReplyData,
        send: impl FnOnce(&mut dyn Sink) -> Option<usize>,
    ) -> Option<ReplyData> {
        let Some(device) = self.device.get().filter(|_| size >= LEAST) else { return Some(reply) };
        let Some(mut pipe) = self.pipes.pop() else { return Some(reply) };
        let mut answer = Answer { pipe: &mut pipe, device, request, len: 0 };
        let (sent, has_begun) = (send(&mut answer).is_some(), answer.len > 0);
        let is_empty = sent || !has_begun || pipe.drain().is_ok();
        if is_empty {
            let _ = self.pipes.push(pipe);
        }
        if !sent {
            return Some(reply);
        }
        // It would answer a second time. What is lost with it is a count of the device's users, and the device is open
        // for as long as this process lives.
        std::mem::forget(reply);
        None
    }
}

impl Pipe {
    fn new() -> io::Result<Pipe> {
        let (from, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // If it is refused, it is as large as any pipe.
        let _ = fcntl_setpipe_size(&into, if sys::is_root() { ROOM } else { LEAST_ROOM });
        let slots = fcntl_getpipe_size(&into)? / PAGE;
        Ok(Pipe { from: from.into(), into: into.into(), slots })
    }

    /// Throws away what is in the pipe.
    fn drain(&mut self) -> io::Result<()> {
        let mut bytes = [0; PAGE];
        loop {
            match self.from.read(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                other => other?,
            };
        }
    }
}

/// A reply on its way into a pipe.
struct Answer<'a> {
    pipe: &'a mut Pipe,
    device: &'a OwnedFd,
    request: RequestId,
    /// Its length in bytes, 0 as long as there is nothing in the pipe.
    len: usize,
}

impl Sink for Answer<'_> {
    fn begin(&mut self, len: usize, pieces: usize) -> Option<()> {
        // Each piece can begin and end within a page; the header has a slot of its own.
        let slots = 1 + len / PAGE + 2 * pieces;
        if len < LEAST || len / pieces < LEAST_PIECE || slots > self.pipe.slots {
            return None;
        }
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&u32::try_from(HEADER + len).ok()?.to_ne_bytes());
        header[8..].copy_from_slice(&self.request.0.to_ne_bytes());
        self.len = HEADER + len;
        self.bytes(&header)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Option<()> {
        self.pipe.into.write_all(bytes).ok()
    }

    fn file(&mut self, file: &File, mut offset: u64, mut len: usize) -> Option<()> {
        while len > 0 {
            match splice(file, Some(&mut offset), &self.pipe.into, None, len, SpliceFlags::empty()) {
                Ok(0) | Err(_) => return None,
                Ok(moved) => len -= moved,
            }
        }
        Some(())
    }

    /// Moves all that is in the pipe to the device, which takes it as one reply.
    fn end(&mut self) -> Option<()> {
        let moved = splice(&self.pipe.from, None, self.device, None, self.len, SpliceFlags::empty());
        if let Err(error) = moved {
            tracing::debug!("a reply could not be spliced: {error}");
        }
        (moved == Ok(self.len)).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn device() -> OwnedFd {
        tempfile::tempfile().unwrap().into()
    }

    fn answer<'a>(pipe: &'a mut Pipe, device: &'a OwnedFd) -> Answer<'a> {
        Answer { pipe, device, request: RequestId(7), len: 0 }
    }

    #[test]
    fn a_reply_is_its_header_and_its_pieces() {
        let mut blob = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
        blob.write_all(&bytes).unwrap();
        let (mut pipe, device) = (Pipe::new().unwrap(), device());
        let mut reply = answer(&mut pipe, &device);
        reply.begin(80_003, 2).unwrap();
        reply.file(&blob, 5_001, 80_000).unwrap();
        reply.bytes(b"end").unwrap();
        reply.end().unwrap();
        let mut whole = vec![0; HEADER + 80_003];
        File::from(device).read_exact_at(&mut whole, 0).unwrap();
        assert_eq!(whole[..HEADER], [80_019u32.to_ne_bytes(), [0; 4], 7u32.to_ne_bytes(), [0; 4]].concat());
        assert_eq!(whole[HEADER..HEADER + 80_000], bytes[5_001..85_001]);
        assert_eq!(&whole[HEADER + 80_000..], b"end");
        assert_eq!(pipe.from.read(&mut whole).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_file_that_ends_early_is_given_up_and_the_pipe_is_of_use_again() {
        let mut blob = tempfile::tempfile().unwrap();
        blob.write_all(&[1; 50_000]).unwrap();
        let (mut pipe, device) = (Pipe::new().unwrap(), device());
        for _ in 0..100 {
            let mut reply = answer(&mut pipe, &device);
            reply.begin(70_000, 1).unwrap();
            assert_eq!(reply.file(&blob, 0, 70_000), None);
            pipe.drain().unwrap();
        }
        answer(&mut pipe, &device).begin(70_000, 1).unwrap();
    }

    #[test]
    fn what_is_small_or_in_small_pieces_or_too_large_is_not_begun() {
        let (mut pipe, device) = (Pipe::new().unwrap(), device());
        let room = pipe.slots * PAGE;
        for (len, pieces) in [(0, 0), (LEAST - 1, 1), (LEAST, LEAST / LEAST_PIECE + 1), (room, 1)] {
            assert_eq!(answer(&mut pipe, &device).begin(len, pieces), None, "{len} bytes in {pieces} pieces");
        }
        pipe.drain().unwrap();
    }

    #[test]
    fn what_does_not_fit_is_given_up_instead_of_waited_for() {
        let mut blob = tempfile::tempfile().unwrap();
        blob.write_all(&vec![1; 2 * ROOM]).unwrap();
        let (mut pipe, device) = (Pipe::new().unwrap(), device());
        assert_eq!(answer(&mut pipe, &device).file(&blob, 0, 2 * ROOM), None);
        pipe.drain().unwrap();
        assert_eq!(answer(&mut pipe, &device).bytes(&vec![1; 2 * ROOM]), None);
    }
}
