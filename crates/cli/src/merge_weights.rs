//! `sconce merge-weights`: one folder of weights, as HuggingFace's libraries read them, from a checkpoint of many ranks.

use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::DType;
use clap::{Args, ValueEnum};
use sconce_core::checkpoint::ExportOptions;
use sconce_core::export::Library;

use crate::checkpoint::open;
use crate::command_error::CommandError;
use crate::terminal::{print, shown};

/// Make one folder of safetensors weights, as transformers reads them, from a checkpoint
///
/// Writes model.safetensors, or shards with model.safetensors.index.json, and nothing else: the model's config.json and tokenizer
/// are to be put beside them. The folder appears whole or not at all; nothing is overwritten, and the checkpoint stays.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The checkpoint, or a folder of numbered ones, of which the newest complete one is taken
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,

    /// The folder to make
    #[arg(value_name = "OUT_DIR")]
    output: PathBuf,

    /// The most bytes of tensors in a file: a number with KB, MB, GB (powers of 1000), KiB, MiB, GiB (of 1024) or none
    #[arg(
        long = "max_shard_size", alias = "max-shard-size", value_name = "SIZE",
        default_value = "5GB", value_parser = file_size
    )]
    max_shard_size: u64,

    /// Whose names the files get: transformers' (model.safetensors) or diffusers' (diffusion_pytorch_model.safetensors)
    #[arg(long, value_name = "LIBRARY", default_value = "transformers")]
    library: WeightLibrary,

    /// The type of the values, rounded to nearest; by default that of the checkpoint, which is f32 where parameters were trained
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<WeightDtype>,

    /// Which model, where the checkpoint has several
    #[arg(long, value_name = "N", default_value_t = 0)]
    model: usize,

    /// Accelerate's: refused, since no pickles are written
    #[arg(long = "unsafe_serialization", alias = "unsafe-serialization", hide = true)]
    unsafe_serialization: bool,

    /// Accelerate's: refused, since nothing that was saved is removed here
    #[arg(long = "remove_checkpoint_dir", alias = "remove-checkpoint-dir", hide = true)]
    remove_checkpoint_dir: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum WeightLibrary {
    Transformers,
    Diffusers,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum WeightDtype {
    #[value(alias = "float32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "float16")]
    F16,
}

/// Runs `sconce merge-weights`.
///
/// # Errors
/// When the checkpoint cannot be read or is damaged, or the folder exists or cannot be written.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    if arguments.unsafe_serialization {
        return Err(CommandError::usage(
            "--unsafe_serialization: Sconce writes no pickles; leave it out, safetensors files are read everywhere",
        ));
    }
    if arguments.remove_checkpoint_dir {
        return Err(CommandError::usage(
            "--remove_checkpoint_dir: Sconce leaves the checkpoint; leave it out, and remove the folder yourself",
        ));
    }
    let options = ExportOptions {
        model: arguments.model,
        library: match arguments.library {
            WeightLibrary::Transformers => Library::Transformers,
            WeightLibrary::Diffusers => Library::Diffusers,
        },
        max_shard_size: arguments.max_shard_size,
        dtype: arguments.dtype.map(|dtype| match dtype {
            WeightDtype::F32 => DType::F32,
            WeightDtype::Bf16 => DType::BF16,
            WeightDtype::F16 => DType::F16,
        }),
        trained_only: false,
    };
    let mut checkpoint = open(&arguments.checkpoint)?;
    let exported = checkpoint
        .export_weights(&arguments.output, &options)
        .map_err(CommandError::failure)?;
    print(&format!(
        "{}: {} tensors in {}\n",
        shown(&arguments.output.display().to_string()),
        exported.tensors,
        exported.files.join(", ")
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Reads a size as Accelerate does: `GiB` and `GB`, and with a small `b` bits.
fn file_size(text: &str) -> Result<u64, String> {
    let expected = || "expected a number of bytes such as 5GB, 500MB or 2GiB".to_owned();
    let digits = text.len() - text.trim_start_matches(|digit: char| digit.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim();
    let factor: u64 = match unit.to_ascii_uppercase().as_str() {
        "" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KIB" => 1 << 10,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        _ => return Err(expected()),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    let bytes = bytes.ok_or_else(expected)?;
    let is_bits = unit.ends_with('b') && !unit.to_ascii_lowercase().ends_with("ib");
    Ok(if is_bits { bytes / 8 } else { bytes })
}

#[cfg(test)]
mod tests {
    use super::file_size;

    /// The results of `accelerate.utils.convert_file_size_to_int`.
    #[test]
    fn sizes_are_read_as_accelerate_reads_them() {
        for (text, bytes) in [
            ("5GB", 5_000_000_000),
            ("1GiB", 1 << 30),
            ("3MiB", 3 << 20),
            ("2KB", 2_000),
            ("8Gb", 1_000_000_000),
            ("123", 123),
        ] {
            assert_eq!(file_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "GB",
            "-1GB",
            "5 PB",
            "1.5GB",
            "99999999999999999999",
            "99999999999GB",
        ] {
            assert!(file_size(text).unwrap_err().contains("such as 5GB"), "{text}");
        }
    }
}
