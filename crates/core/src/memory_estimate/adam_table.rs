//! Accelerate's table of `estimate-memory`: the largest layer, the whole model, and training with Adam.

/// A type of Accelerate's `--dtypes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableDtype {
    /// f32.
    Float32,
    /// f16, and bf16 too.
    Float16,
    /// Eight bits; trained by nobody.
    Int8,
    /// Four bits.
    Int4,
}

impl TableDtype {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Float32, Self::Float16, Self::Int8, Self::Int4];

    /// Returns Accelerate's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// By how much the bytes of f32 are divided.
    fn divisor(self) -> u64 {
        match self {
            Self::Float32 => 1,
            Self::Float16 => 2,
            Self::Int8 => 4,
            Self::Int4 => 8,
        }
    }
}

/// Accelerate's rules for a model, whose bytes in f32 it is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdamTable {
    /// Bytes of the largest layer in f32.
    pub largest_layer: u64,
    /// Bytes of all parameters in f32.
    pub total: u64,
}

/// One row of the table, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdamRow {
    /// Its type.
    pub dtype: TableDtype,
    /// The largest layer.
    pub largest_layer: u64,
    /// All parameters.
    pub total: u64,
    /// The most of the four phases of a step (model, gradients, optimizer, step); `None` where nobody trains.
    pub training: Option<u64>,
}

impl AdamTable {
    /// Returns the row of a type.
    pub fn row(&self, dtype: TableDtype) -> AdamRow {
        let divisor = dtype.divisor();
        AdamRow {
            dtype,
            largest_layer: self.largest_layer / divisor,
            total: self.total / divisor,
            training: match dtype {
                // A step has model, gradients and two moments at once.
                TableDtype::Float32 => Some(4 * self.total),
                // Moments of f32, before which there are a copy of 16 bits and its gradients.
                TableDtype::Float16 => Some(2 * self.total),
                TableDtype::Int8 | TableDtype::Int4 => None,
            },
        }
    }
}
