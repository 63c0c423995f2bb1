//! [`Dtype`], the element types of every container, in one table.

use std::fmt;
use std::str::FromStr;

/// The element type of a tensor.
///
/// The first 22 are those of safetensors, narrowest first, in the order of its Rust crate (which sorts tensors
/// by it); the last six exist only in CoreML's weight files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs, non_camel_case_types)]
pub enum Dtype {
    Bool,
    F4,
    F6E2M3,
    F6E3M2,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
    I4,
    U1,
    U2,
    U3,
    U4,
    U6,
}

/// What each container calls a dtype.
struct Row {
    dtype: Dtype,
    /// Name in safetensors headers; the last six are ours.
    name: &'static str,
    bits: u32,
    /// Code in the metadata of a MIL blob (coremltools, MILBlob/Blob/BlobDataType.hpp); 0 is none.
    mil_blob: u32,
    /// Data type code of an AMB record.
    amb: Option<u8>,
}

const fn row(dtype: Dtype, name: &'static str, bits: u32, mil_blob: u32, amb: Option<u8>) -> Row {
    Row { dtype, name, bits, mil_blob, amb }
}

const TABLE: [Row; 28] = [
    row(Dtype::Bool, "BOOL", 8, 0, None),
    row(Dtype::F4, "F4", 4, 0, None),
    row(Dtype::F6E2M3, "F6_E2M3", 6, 0, None),
    row(Dtype::F6E3M2, "F6_E3M2", 6, 0, None),
    row(Dtype::U8, "U8", 8, 3, None),
    row(Dtype::I8, "I8", 8, 4, Some(3)),
    row(Dtype::F8E5M2, "F8_E5M2", 8, 17, None),
    row(Dtype::F8E4M3, "F8_E4M3", 8, 16, None),
    row(Dtype::F8E8M0, "F8_E8M0", 8, 0, None),
    row(Dtype::F8E4M3Fnuz, "F8_E4M3FNUZ", 8, 0, None),
    row(Dtype::F8E5M2Fnuz, "F8_E5M2FNUZ", 8, 0, None),
    row(Dtype::I16, "I16", 16, 6, None),
    row(Dtype::U16, "U16", 16, 7, None),
    row(Dtype::F16, "F16", 16, 1, Some(1)),
    row(Dtype::BF16, "BF16", 16, 5, Some(2)),
    row(Dtype::I32, "I32", 32, 14, None),
    row(Dtype::U32, "U32", 32, 15, None),
    row(Dtype::F32, "F32", 32, 2, Some(0)),
    row(Dtype::C64, "C64", 64, 0, None),
    row(Dtype::F64, "F64", 64, 0, None),
    row(Dtype::I64, "I64", 64, 0, None),
    row(Dtype::U64, "U64", 64, 0, None),
    row(Dtype::I4, "I4", 4, 8, None),
    row(Dtype::U1, "U1", 1, 9, None),
    row(Dtype::U2, "U2", 2, 10, None),
    row(Dtype::U3, "U3", 3, 12, None),
    row(Dtype::U4, "U4", 4, 11, None),
    row(Dtype::U6, "U6", 6, 13, None),
];

impl Dtype {
    fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// All dtypes, narrowest safetensors type first.
    pub fn all() -> impl Iterator<Item = Dtype> {
        TABLE.iter().map(|row| row.dtype)
    }

    /// The name: that of safetensors where it has one.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Width of an element, in bits.
    pub fn bits(self) -> u32 {
        self.row().bits
    }

    /// Whether safetensors headers can name it.
    pub fn in_safetensors(self) -> bool {
        self <= Dtype::U64
    }

    /// The code in a MIL blob's metadata.
    pub fn mil_blob_code(self) -> Option<u32> {
        Some(self.row().mil_blob).filter(|&code| code != 0)
    }

    /// The dtype of a MIL blob's code.
    pub fn from_mil_blob_code(code: u32) -> Option<Dtype> {
        TABLE.iter().find(|row| code != 0 && row.mil_blob == code).map(|row| row.dtype)
    }

    /// The code in an AMB record.
    pub fn amb_code(self) -> Option<u8> {
        self.row().amb
    }

    /// The dtype of a plain AMB code.
    pub fn from_amb_code(code: u8) -> Option<Dtype> {
        TABLE.iter().find(|row| row.amb == Some(code)).map(|row| row.dtype)
    }

    /// Elements in a tensor of this shape; `None` if the product does not fit.
    pub fn elements(shape: &[u64]) -> Option<u64> {
        // A zero anywhere makes the tensor empty, whatever the other dimensions multiply to.
        if shape.contains(&0) {
            return Some(0);
        }
        shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
    }

    /// Bytes of a tensor of this shape, the last byte filled up; `None` if the number does not fit.
    pub fn bytes(self, shape: &[u64]) -> Option<u64> {
        let bits = Self::elements(shape)?.checked_mul(self.bits().into())?;
        Some(bits.div_ceil(8))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Dtype, String> {
        TABLE
            .iter()
            .find(|row| row.name == name)
            .map(|row| row.dtype)
            .ok_or_else(|| format!("{:?} is no known dtype", name.chars().take(40).collect::<String>()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_indexed_by_the_enum() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.dtype as usize, index);
            assert_eq!(row.name.parse(), Ok(row.dtype));
        }
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(Dtype::F32.bytes(&[2, 3]), Some(24));
        assert_eq!(Dtype::F32.bytes(&[]), Some(4));
        assert_eq!(Dtype::U3.bytes(&[5]), Some(2));
        assert_eq!(Dtype::F32.bytes(&[u64::MAX, 0]), Some(0));
        assert_eq!(Dtype::F32.bytes(&[u64::MAX, 2]), None);
        assert_eq!(Dtype::F32.bytes(&[u64::MAX]), None);
    }
}
