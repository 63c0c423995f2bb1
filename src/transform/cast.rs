//! Elements as fp16.

use super::Input;
use super::float::{Float, TILE, store_f16};
use super::granules::{self, Granule};
use crate::error::Result;

pub(super) fn read(float: Float, input: &dyn Input, offset: u64, out: &mut [u8]) -> Result<()> {
    let granule = Granule { input: float.bytes(), output: 2 };
    granules::read(granule, input, offset, out, |bytes, out| {
        let mut tiles = out.chunks_mut(2 * TILE);
        float.for_each_tile(bytes, |values| {
            if let Some(out) = tiles.next() {
                store_f16(values, out);
            }
        });
    })
}
