//! What stands for a GPU in a build that knows none: there never is one.

use super::{Conversion, DeviceStep, NormPiece, StepTarget};
use crate::layout::{BucketLayout, Slot};
use crate::{Norm, Result};
use candle_core::{DType, Tensor};
use sconce_collectives::Buffer;
use std::ops::Range;

/// No GPU.
#[derive(Debug)]
pub(crate) enum Gpu {}

impl Gpu {
    pub(crate) fn allocate(&self, _bytes: usize) -> Result<Buffer> {
        match *self {}
    }

    pub(crate) fn take(&self, _bytes: usize) -> Result<Buffer> {
        match *self {}
    }

    pub(crate) fn give_back(&self, _buffer: Buffer) {
        match *self {}
    }

    pub(crate) fn passing_bytes(&self) -> usize {
        match *self {}
    }

    pub(crate) fn host_accesses(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn reaches(&self, _tensor: &Tensor) -> bool {
        match *self {}
    }

    pub(crate) fn place(
        &self,
        _gradient: &Tensor,
        _place: (&BucketLayout, &Slot),
        _bucket: &mut Buffer,
        _is_first: bool,
    ) -> Result<()> {
        match *self {}
    }

    pub(crate) fn add(&self, _from: (&Buffer, usize), _to: &mut Buffer, _count: usize, _is_first: bool) -> Result<()> {
        match *self {}
    }

    pub(crate) fn convert(
        &self,
        _dtype: DType,
        _wide: (&mut Buffer, &Range<usize>),
        _narrow: &mut Buffer,
        _way: Conversion,
    ) -> Result<()> {
        match *self {}
    }

    pub(crate) fn zero(&self, _buffer: &mut Buffer, _elements: Range<usize>) -> Result<()> {
        match *self {}
    }

    pub(crate) fn scale(&self, _buffer: &mut Buffer, _elements: Range<usize>, _factor: f32) -> Result<()> {
        match *self {}
    }

    pub(crate) fn clamp(&self, _pieces: Vec<(&mut Buffer, Vec<Range<usize>>)>, _limit: f32) -> Result<bool> {
        match *self {}
    }

    pub(crate) fn are_finite(&self, _pieces: &[(&Buffer, Range<usize>)]) -> Result<bool> {
        match *self {}
    }

    pub(crate) fn norms(&self, _norm: Norm, _pieces: &[NormPiece<'_>]) -> Result<Vec<f64>> {
        match *self {}
    }

    pub(crate) fn copy(&self, _from: &Buffer, _to: (&mut Buffer, usize), _bytes: usize) -> Result<()> {
        match *self {}
    }

    pub(crate) fn step(&self, _step: DeviceStep<'_>, _target: StepTarget<'_>) -> Result<()> {
        match *self {}
    }
}
