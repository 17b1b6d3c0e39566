//! The element types that ranks exchange, and byte views that carry their type.
//!
//! Backends are object-safe, so they see [`Elements`] and [`ElementsMut`]: bytes plus an [`ElementType`]. Users see
//! slices of an [`Element`] type.

use crate::{Error, Result};
use half::{bf16, f16};

/// A numeric type that every backend moves and reduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ElementType {
    /// 8-bit unsigned integer; also the type for opaque bytes.
    U8 = 0,
    /// 32-bit unsigned integer.
    U32 = 1,
    /// 64-bit signed integer.
    I64 = 2,
    /// IEEE half precision; sums accumulate in f32.
    F16 = 3,
    /// bfloat16; sums accumulate in f32.
    BF16 = 4,
    /// IEEE single precision.
    F32 = 5,
    /// IEEE double precision.
    F64 = 6,
}

impl ElementType {
    /// All element types.
    pub const ALL: [Self; 7] = [
        Self::U8,
        Self::U32,
        Self::I64,
        Self::F16,
        Self::BF16,
        Self::F32,
        Self::F64,
    ];

    /// Returns the size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Returns the name that candle and PyTorch users know, for example `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }

    /// Says whether the type is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::BF16 | Self::F32 | Self::F64)
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|element| *element as u8 == code)
    }
}

impl TryFrom<candle_core::DType> for ElementType {
    type Error = Error;

    fn try_from(dtype: candle_core::DType) -> Result<Self> {
        use candle_core::DType;
        match dtype {
            DType::U8 => Ok(Self::U8),
            DType::U32 => Ok(Self::U32),
            DType::I64 => Ok(Self::I64),
            DType::F16 => Ok(Self::F16),
            DType::BF16 => Ok(Self::BF16),
            DType::F32 => Ok(Self::F32),
            DType::F64 => Ok(Self::F64),
            other => Err(Error::Unsupported {
                what: format!("collective on a tensor of dtype {}", other.as_str()),
                hint: "convert it to one of u8, u32, i64, f16, bf16, f32, f64".into(),
            }),
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type with an [`ElementType`].
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed + 'static {
    /// The type's tag.
    const TYPE: ElementType;
}

macro_rules! element {
    ($($rust:ty => $tag:ident),*) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const TYPE: ElementType = ElementType::$tag;
        }
    )*};
}
element!(u8 => U8, u32 => U32, i64 => I64, f16 => F16, bf16 => BF16, f32 => F32, f64 => F64);

/// A read-only view of elements of one type.
#[derive(Clone, Copy)]
pub struct Elements<'a> {
    element: ElementType,
    bytes: &'a [u8],
}

impl<'a> Elements<'a> {
    /// Views a typed slice.
    pub fn new<T: Element>(values: &'a [T]) -> Self {
        Self {
            element: T::TYPE,
            bytes: bytemuck::cast_slice(values),
        }
    }

    /// Returns the type of the elements.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.element.size()
    }

    /// Says whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Views bytes as elements of a type.
    ///
    /// # Panics
    /// When the bytes do not fill whole elements.
    pub(crate) fn of_bytes(element: ElementType, bytes: &'a [u8]) -> Self {
        assert!(bytes.len().is_multiple_of(element.size()), "whole elements");
        Self { element, bytes }
    }

    /// Returns the elements.
    ///
    /// # Panics
    /// When they are of another type.
    pub fn typed<T: Element>(&self) -> &'a [T] {
        assert_eq!(self.element, T::TYPE, "elements are viewed as what they are");
        bytemuck::cast_slice(self.bytes)
    }
}

/// A writable view of elements of one type.
pub struct ElementsMut<'a> {
    element: ElementType,
    bytes: &'a mut [u8],
}

impl<'a> ElementsMut<'a> {
    /// Views a typed slice.
    pub fn new<T: Element>(values: &'a mut [T]) -> Self {
        Self {
            element: T::TYPE,
            bytes: bytemuck::cast_slice_mut(values),
        }
    }

    /// Views bytes as elements of a type.
    #[cfg(all(test, feature = "nccl"))]
    pub(crate) fn of_bytes(element: ElementType, bytes: &'a mut [u8]) -> Self {
        assert!(bytes.len().is_multiple_of(element.size()), "whole elements");
        Self { element, bytes }
    }

    /// Returns the type of the elements.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.element.size()
    }

    /// Says whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// Returns the bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl std::fmt::Debug for Elements<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.len(), self.element.name())
    }
}

impl std::fmt::Debug for ElementsMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.len(), self.element.name())
    }
}
