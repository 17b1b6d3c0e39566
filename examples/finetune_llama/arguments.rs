//! The arguments of the program.

use std::path::PathBuf;

use clap::Parser;

/// Fine-tunes a HuggingFace Llama, Mistral, Qwen2 or Qwen3.
#[derive(Debug, Parser)]
#[command(rename_all = "snake_case", allow_negative_numbers = true)]
pub(crate) struct Arguments {
    /// Folder with config.json, safetensors weights and tokenizer.json; the small model shipped with the examples by default.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-llama"), hide_default_value = true)]
    pub(crate) model_dir: PathBuf,
    /// Begin with random weights drawn from --seed, from config.json alone.
    #[arg(long)]
    pub(crate) random_weights: bool,
    /// Text; JSON lines or Parquet with `text`, with `instruction`, `input` and `output`, or with `messages`; or safetensors with
    /// `tokens` [steps, global batch, sequence] and optional `labels`. A short text shipped with the examples by default.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/text/declaration_of_independence.txt"), hide_default_value = true)]
    pub(crate) data: PathBuf,
    /// Tokens in a row of text [default: 128], or the most of a row of questions and answers [default: 512].
    #[arg(long)]
    pub(crate) sequence_length: Option<usize>,
    /// Put as many questions and answers into a row as fit; they do not see each other.
    #[arg(long)]
    pub(crate) packing: bool,
    /// Times through the data, where --steps does not say [default: 3; 1 through a file of tokens].
    #[arg(long, conflicts_with = "steps")]
    pub(crate) num_train_epochs: Option<f64>,
    /// Optimizer steps.
    #[arg(long)]
    pub(crate) steps: Option<u64>,
    /// Rows that one rank takes at a time; by default 4 of a text, the rank's share of a step of a file of tokens.
    #[arg(long)]
    pub(crate) per_device_batch_size: Option<usize>,
    /// Micro-batches whose gradients add up to one optimizer step; by default what the launcher says, or 1.
    #[arg(long)]
    pub(crate) gradient_accumulation_steps: Option<u64>,
    /// Average over all tokens of a step that have a label, instead of over the means of micro-batches [default: true for
    /// questions and answers, else false].
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) token_mean: Option<bool>,
    /// Train adapters of this rank beside frozen weights (LoRA) instead of the weights.
    #[arg(long, value_name = "RANK")]
    pub(crate) lora_r: Option<usize>,
    /// The product of an adapter is multiplied by this, divided by the rank; twice the rank by default.
    #[arg(long, requires = "lora_r")]
    pub(crate) lora_alpha: Option<f64>,
    /// Divide by the root of the rank instead (rsLoRA).
    #[arg(long, requires = "lora_r")]
    pub(crate) use_rslora: bool,
    /// Probability with which elements of an adapter's input are dropped.
    #[arg(long, default_value_t = 0.0, requires = "lora_r")]
    pub(crate) lora_dropout: f32,
    /// Projections with adapters, with commas between, or all-linear.
    #[arg(long, value_delimiter = ',', default_value = "q_proj,v_proj", requires = "lora_r")]
    pub(crate) lora_target_modules: Vec<String>,
    /// Write the adapted weights as a model, instead of the adapters alone.
    #[arg(long, requires = "lora_r", requires = "output_dir")]
    pub(crate) merge_adapters: bool,
    /// Data to evaluate on, in any form of --data.
    #[arg(long)]
    pub(crate) eval_data: Option<PathBuf>,
    /// Part of the data that is held out to evaluate on.
    #[arg(long, default_value_t = 0.0, conflicts_with = "eval_data")]
    pub(crate) eval_fraction: f64,
    /// Optimizer steps between two evaluations; by default one, after the last step.
    #[arg(long)]
    pub(crate) eval_steps: Option<u64>,
    /// End training after so many evaluations without a smaller loss.
    #[arg(long)]
    pub(crate) early_stopping_patience: Option<u64>,
    /// By how much the loss must be smaller.
    #[arg(long, default_value_t = 0.0, requires = "early_stopping_patience")]
    pub(crate) early_stopping_threshold: f64,
    /// A question (or the beginning of a text) that the model answers at every evaluation; may be given several times.
    #[arg(long)]
    pub(crate) sample_prompt: Vec<String>,
    /// The most tokens of an answer.
    #[arg(long, default_value_t = 64)]
    pub(crate) sample_tokens: usize,
    /// How much chance answers are given: 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Highest learning rate.
    #[arg(long, default_value_t = 5e-5)]
    pub(crate) lr: f64,
    /// Decay of the first moment.
    #[arg(long, default_value_t = 0.9)]
    pub(crate) adam_beta1: f64,
    /// Decay of the second moment.
    #[arg(long, default_value_t = 0.999)]
    pub(crate) adam_beta2: f64,
    /// Added to the root of the second moment.
    #[arg(long, default_value_t = 1e-8)]
    pub(crate) adam_epsilon: f64,
    /// Decoupled weight decay of every parameter.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) weight_decay: f64,
    /// Exempts norms and biases from weight decay.
    #[arg(long)]
    pub(crate) no_decay_norms_and_biases: bool,
    /// Optimizer steps over which the learning rate rises from 0; then it falls to 0 at the last step.
    #[arg(long, default_value_t = 0)]
    pub(crate) warmup_steps: u64,
    /// Largest global norm of the gradients.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) max_grad_norm: f64,
    /// Seed for the order of rows of a text.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// New or empty folder for the trained model; with --lora_r for its adapters, as PEFT loads them.
    #[arg(long)]
    pub(crate) output_dir: Option<PathBuf>,
    /// File for one JSON line per optimizer step: step, loss, grad_norm, lr, tokens_per_second.
    #[arg(long)]
    pub(crate) metrics_out: Option<PathBuf>,
    /// Experiment trackers that get the same numbers, and the run's settings: jsonl, csv, tensorboard, wandb, mlflow, dvclive
    /// (and trackio, with the feature of that name) with commas between, or all.
    #[arg(long, value_name = "NAME[,NAME]")]
    pub(crate) report_to: Option<String>,
    /// Folder for what trackers write.
    #[arg(long, default_value = "logs", requires = "report_to")]
    pub(crate) logging_dir: PathBuf,
    /// Print at the end what each rank holds and moves.
    #[arg(long)]
    pub(crate) report: bool,
    /// Folder of numbered checkpoints.
    #[arg(long)]
    pub(crate) checkpoints: Option<PathBuf>,
    /// Optimizer steps between two checkpoints; 0 for none.
    #[arg(long, default_value_t = 0, requires = "checkpoints")]
    pub(crate) checkpointing_steps: u64,
    /// How many checkpoints are kept; all by default.
    #[arg(long, requires = "checkpoints")]
    pub(crate) checkpoints_total_limit: Option<usize>,
    /// Go on from a checkpoint: its folder, or `latest` for the newest complete one in --checkpoints, if there is one.
    #[arg(long)]
    pub(crate) resume_from_checkpoint: Option<PathBuf>,
    /// Folder for a trace of where each rank's time goes, for Chrome (about:tracing) or Perfetto.
    #[arg(long)]
    pub(crate) profile: Option<PathBuf>,
    /// Optimizer steps between two printed lines.
    #[arg(long, default_value_t = 10)]
    pub(crate) logging_steps: u64,
}
