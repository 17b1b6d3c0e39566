//! Tensors in tuples, lists and maps: taken apart for what ranks exchange, and put together again.

use crate::{Error, Result};
use candle_core::Tensor;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;

/// A piece of something [`Nested`].
#[derive(Debug, Clone)]
pub enum Part {
    /// A tensor.
    Tensor(Tensor),
    /// Something else: a number, a text, how many parts follow.
    Value(Value),
}

/// Parts in the order in which they were taken.
#[derive(Debug)]
pub struct Parts(std::vec::IntoIter<Part>);

/// Tensors, and tuples, `Vec`s, `Option`s and `BTreeMap`s of such; also numbers and strings, which are left as they are.
///
/// A struct of your own becomes one by its fields:
///
/// ```
/// use candle_core::Tensor;
/// use sconce_core::{Nested, Part, Parts, Result};
///
/// struct Batch {
///     tokens: Tensor,
///     labels: Tensor,
/// }
///
/// impl Nested for Batch {
///     fn take_apart(&self, parts: &mut Vec<Part>) {
///         self.tokens.take_apart(parts);
///         self.labels.take_apart(parts);
///     }
///
///     fn put_together(parts: &mut Parts) -> Result<Self> {
///         Ok(Self { tokens: Nested::put_together(parts)?, labels: Nested::put_together(parts)? })
///     }
/// }
/// ```
pub trait Nested: Sized {
    /// Appends the parts, always as many and in the same order for values of one form.
    fn take_apart(&self, parts: &mut Vec<Part>);

    /// Makes a value of the next parts, which `take_apart` gave.
    ///
    /// # Errors
    /// [`Error::Parts`] when these are not its parts.
    fn put_together(parts: &mut Parts) -> Result<Self>;

    /// Returns the same with other tensors; stops at the first failure.
    ///
    /// # Errors
    /// Those of `change`.
    fn map_tensors(&self, mut change: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let mut parts = Vec::new();
        self.take_apart(&mut parts);
        for part in &mut parts {
            if let Part::Tensor(tensor) = part {
                *tensor = change(tensor)?;
            }
        }
        Self::put_together(&mut Parts::new(parts))
    }
}

impl Parts {
    /// Makes parts to be taken.
    pub fn new(parts: Vec<Part>) -> Self {
        Self(parts.into_iter())
    }

    /// Takes a tensor.
    ///
    /// # Errors
    /// [`Error::Parts`] when the next part is none.
    pub fn tensor(&mut self) -> Result<Tensor> {
        match self.0.next() {
            Some(Part::Tensor(tensor)) => Ok(tensor),
            other => Err(unexpected("a tensor", other.as_ref())),
        }
    }

    /// Takes a value.
    ///
    /// # Errors
    /// [`Error::Parts`] when the next part is none of this type.
    pub fn value<T: DeserializeOwned>(&mut self) -> Result<T> {
        let next = self.0.next();
        let of_type = match &next {
            Some(Part::Value(value)) => T::deserialize(value).ok(),
            _ => None,
        };
        of_type.ok_or_else(|| unexpected(std::any::type_name::<T>(), next.as_ref()))
    }
}

fn unexpected(expected: &'static str, found: Option<&Part>) -> Error {
    let found = match found {
        None => "nothing more".to_owned(),
        Some(Part::Tensor(tensor)) => format!("a tensor {:?}", tensor.dims()),
        Some(Part::Value(value)) => value.to_string(),
    };
    Error::Parts { expected, found }
}

impl Nested for Tensor {
    fn take_apart(&self, parts: &mut Vec<Part>) {
        parts.push(Part::Tensor(self.clone()));
    }

    fn put_together(parts: &mut Parts) -> Result<Self> {
        parts.tensor()
    }
}

impl<T: Nested> Nested for Vec<T> {
    fn take_apart(&self, parts: &mut Vec<Part>) {
        parts.push(Part::Value(self.len().into()));
        self.iter().for_each(|item| item.take_apart(parts));
    }

    fn put_together(parts: &mut Parts) -> Result<Self> {
        let count = parts.value::<usize>()?;
        (0..count).map(|_| T::put_together(parts)).collect()
    }
}

impl<T: Nested> Nested for Option<T> {
    fn take_apart(&self, parts: &mut Vec<Part>) {
        parts.push(Part::Value(self.is_some().into()));
        self.iter().for_each(|item| item.take_apart(parts));
    }

    fn put_together(parts: &mut Parts) -> Result<Self> {
        parts.value::<bool>()?.then(|| T::put_together(parts)).transpose()
    }
}

impl<T: Nested> Nested for BTreeMap<String, T> {
    fn take_apart(&self, parts: &mut Vec<Part>) {
        parts.push(Part::Value(self.len().into()));
        for (key, item) in self {
            parts.push(Part::Value(key.as_str().into()));
            item.take_apart(parts);
        }
    }

    fn put_together(parts: &mut Parts) -> Result<Self> {
        let count = parts.value::<usize>()?;
        (0..count)
            .map(|_| Ok((parts.value()?, T::put_together(parts)?)))
            .collect()
    }
}

macro_rules! nested_values {
    ($($kind:ty),*) => {$(
        impl Nested for $kind {
            fn take_apart(&self, parts: &mut Vec<Part>) {
                parts.push(Part::Value(self.clone().into()));
            }

            fn put_together(parts: &mut Parts) -> Result<Self> {
                parts.value()
            }
        }
    )*};
}

nested_values!(bool, u8, u32, u64, usize, i32, i64, String);

/// As bits: JSON knows no infinity, and nothing that is not a number.
impl Nested for f64 {
    fn take_apart(&self, parts: &mut Vec<Part>) {
        parts.push(Part::Value(self.to_bits().into()));
    }

    fn put_together(parts: &mut Parts) -> Result<Self> {
        Ok(Self::from_bits(parts.value()?))
    }
}

impl Nested for f32 {
    fn take_apart(&self, parts: &mut Vec<Part>) {
        parts.push(Part::Value(self.to_bits().into()));
    }

    fn put_together(parts: &mut Parts) -> Result<Self> {
        Ok(Self::from_bits(parts.value()?))
    }
}

impl Nested for () {
    fn take_apart(&self, _: &mut Vec<Part>) {}

    fn put_together(_: &mut Parts) -> Result<Self> {
        Ok(())
    }
}

macro_rules! nested_tuples {
    ($(($($kind:ident $place:tt),+)),*) => {$(
        impl<$($kind: Nested),+> Nested for ($($kind,)+) {
            fn take_apart(&self, parts: &mut Vec<Part>) {
                $(self.$place.take_apart(parts);)+
            }

            fn put_together(parts: &mut Parts) -> Result<Self> {
                Ok(($($kind::put_together(parts)?,)+))
            }
        }
    )*};
}

nested_tuples!((A 0), (A 0, B 1), (A 0, B 1, C 2), (A 0, B 1, C 2, D 3), (A 0, B 1, C 2, D 3, E 4), (A 0, B 1, C 2, D 3, E 4, F 5));
