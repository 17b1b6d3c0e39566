//! The layers of `sconce_core::nn` against closed forms in `f64`, finite differences, and candle's
//! slow differentiable compositions.

mod adaptive_layer_norm;
mod attention;
mod cross_entropy;
mod dropout;
mod embedding;
mod gelu;
mod layer_norm;
mod linear;
mod lora;
mod mixed_dtypes;
mod oracle;
mod rms_norm;
mod rotary;
mod softmax;
mod swiglu;
