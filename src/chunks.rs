//! Reading what is too long to be held in memory, one chunk after the other.

use std::ops::Range;

/// Bytes of a chunk: so many that the system calls do not show, and so few that they stay in a core's cache.
pub const CHUNK: usize = 1 << 20;

/// A buffer for chunks of a range of `len` bytes.
pub fn buffer(len: u64) -> Vec<u8> {
    vec![0; usize::try_from(len).unwrap_or(CHUNK).min(CHUNK)]
}

/// Gives `each` the chunks of a range, in order, which `read` fills from an offset on; a chunk is as long as `buf`, and
/// the last one as what is left.
pub fn for_each_chunk<E>(
    range: Range<u64>,
    buf: &mut [u8],
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut at = range.start;
    while at < range.end {
        let len = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(buf.len());
        read(at, &mut buf[..len])?;
        each(&buf[..len])?;
        at += len as u64;
    }
    Ok(())
}

/// The same of all that follows an offset: `read` says how many bytes it has read, 0 at the end.
pub fn for_each_to_the_end<E>(
    start: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<usize, E>,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (mut buf, mut at) = (vec![0; CHUNK], start);
    loop {
        match read(at, &mut buf)? {
            0 => return Ok(()),
            len => {
                each(&buf[..len])?;
                at += len as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_seen_once_and_in_order() {
        let content: Vec<u8> = (0..200).collect();
        let (mut buf, mut seen) = ([0; 64], Vec::new());
        let fill = |at: u64, buf: &mut [u8]| -> Result<(), ()> {
            buf.copy_from_slice(&content[at as usize..][..buf.len()]);
            Ok(())
        };
        for_each_chunk(3..197, &mut buf, fill, |chunk| {
            seen.extend_from_slice(chunk);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, content[3..197]);
        let some = |at: u64, buf: &mut [u8]| -> Result<usize, ()> {
            let len = (content.len() - at as usize).min(7);
            buf[..len].copy_from_slice(&content[at as usize..][..len]);
            Ok(len)
        };
        seen.clear();
        for_each_to_the_end(3, some, |chunk| {
            seen.extend_from_slice(chunk);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, content[3..]);
        assert_eq!(for_each_chunk(0..9, &mut buf, |_, _| Err("read"), |_| Ok(())), Err("read"));
        assert_eq!(for_each_to_the_end(0, |_, _| Ok(1), |_| Err("each")), Err("each"));
    }
}
