//! How a linear layer gets its state from the `VarBuilder` that it is made from, whatever a model does with that in between.

use super::{Fp8Layer, Fp8Scaling};
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::cell::RefCell;
use std::sync::Arc;

/// The name by which a layer asks a `VarBuilder` for its scaling. No file has it: names there are text.
const QUESTION: &str = "\u{0}sconce-fp8";

thread_local! {
    /// The answer to a question just asked, on its way from the backend through candle's `VarBuilder` to the asker.
    static ANSWER: RefCell<Option<(Arc<Fp8Scaling>, String)>> = const { RefCell::new(None) };
}

/// Returns a `VarBuilder` of the same parameters whose linear layers compute in fp8.
pub(crate) fn with_scaling(vb: VarBuilder<'static>, scaling: Arc<Fp8Scaling>) -> VarBuilder<'static> {
    let (dtype, device) = (vb.dtype(), vb.device().clone());
    VarBuilder::from_backend(Box::new(ScaledBackend { vb, scaling }), dtype, device)
}

/// Returns the state of the layer that is made from `vb`, if it computes in fp8; its weight has this shape.
pub(crate) fn layer_of(vb: &VarBuilder<'_>, shape: &[usize]) -> Option<Arc<Fp8Layer>> {
    ANSWER.with_borrow_mut(Option::take);
    // Whatever comes back (an error, from most backends) means nothing; the answer is beside it.
    drop(vb.get_unchecked_dtype(QUESTION, DType::U8));
    let (scaling, name) = ANSWER.with_borrow_mut(Option::take)?;
    scaling.layer(&name, shape)
}

struct ScaledBackend {
    vb: VarBuilder<'static>,
    scaling: Arc<Fp8Scaling>,
}

impl ScaledBackend {
    fn on(&self, device: &Device) -> VarBuilder<'static> {
        self.vb.clone().set_device(device.clone())
    }
}

impl SimpleBackend for ScaledBackend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.on(device).get_with_hints_dtype(shape, name, init, dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some(layer) = name.strip_suffix(QUESTION) {
            let layer = layer.strip_suffix('.').unwrap_or(layer).to_owned();
            ANSWER.with_borrow_mut(|answer| *answer = Some((Arc::clone(&self.scaling), layer)));
            candle_core::bail!("a question of a layer, not a parameter");
        }
        self.on(device).get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vb.contains_tensor(name)
    }
}
