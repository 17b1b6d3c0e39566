//! What training a model will take in memory, told from its configuration or its headers: nothing is loaded or started.
//!
//! In reading order: a model as shapes ([`ModelShape`]), read from a configuration or from the headers of weights; what is
//! asked for ([`Workload`], [`RunChoice`]); what comes of it ([`MemoryEstimate`]), of which training state is laid out by the
//! engine's own code ([`MemoryForecast`](sconce_zero::MemoryForecast)) and activations are counted by [`Activations`]; the
//! cheapest choice that fits ([`candidates`], [`Limits`]); and Accelerate's table ([`AdamTable`]).
//!
//! ```
//! use sconce_core::memory_estimate::{MemoryEstimate, ModelShape, RunChoice, RunStrategy, Workload};
//!
//! let config = r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
//!     "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096}"#;
//! let model = ModelShape::from_config(config, "config.json".as_ref())?;
//! let workload = Workload { ranks: 8, ranks_per_host: 8, ..Workload::default() };
//! let estimate = MemoryEstimate::new(&model, &workload, RunChoice::new(RunStrategy::Zero3))?;
//! assert!(estimate.optimizer < 8 * model.elements());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod activations;
mod adam_table;
mod cogvideox;
mod error;
mod estimate;
mod llama;
mod model_shape;
mod recommendation;
mod run_choice;
mod source;
mod workload;

pub use activations::{Activations, PartActivations};
pub use adam_table::{AdamRow, AdamTable, TableDtype};
pub use cogvideox::CogVideoXShape;
pub use error::EstimateError;
pub use estimate::MemoryEstimate;
pub use llama::LlamaShape;
pub use model_shape::{Architecture, ModelShape, ShapedParameter};
pub use recommendation::{Limits, candidates};
pub use run_choice::{RunChoice, RunStrategy};
pub use workload::{ComputeDevice, OptimizerKind, Workload};
