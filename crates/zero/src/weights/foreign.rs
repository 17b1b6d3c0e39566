//! Weights in formats of others, which are recognised by their names and never opened.
//!
//! All of them are Python pickles inside, and to read a pickle is to run what its author wrote. So they are refused, with
//! the line that converts them where PyTorch is: its own readers know which objects are safe.

use std::fmt;
use std::path::{Path, PathBuf};

/// Weights that Sconce does not read; shown as what they are, and the command that converts them to safetensors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignWeights {
    /// A folder of PyTorch's distributed checkpoints: `.metadata` and `__0_0.distcp`.
    TorchDistributed(PathBuf),
    /// A folder that DeepSpeed's `save_checkpoint` wrote, and the tag in it.
    DeepSpeed {
        /// The folder with the tags' folders.
        folder: PathBuf,
        /// The tag, where it is known.
        tag: Option<String>,
    },
    /// A pickle, such as `pytorch_model.bin`.
    Pickle(PathBuf),
}

/// What the names of pickles end with.
const PICKLES: [&str; 6] = ["bin", "ckpt", "pickle", "pkl", "pt", "pth"];

impl ForeignWeights {
    /// Recognises a file, or a folder by the names of the files in it; `None` where there are safetensors files.
    pub fn find(path: &Path) -> Option<Self> {
        if path.is_dir() {
            return Self::find_below(path).or_else(|| Self::find_in(path));
        }
        let name = path.file_name()?.to_str()?;
        let folder = path.parent().map_or_else(PathBuf::new, Path::to_owned);
        match name {
            _ if is_of_torch_distributed(name) => Some(Self::TorchDistributed(folder)),
            _ if is_of_deepspeed(name) => Some(Self::of_tag(&folder)),
            _ if is_pickle(name) => Some(Self::Pickle(path.into())),
            _ => None,
        }
    }

    /// Looks where a folder's `latest` points, and for what Accelerate puts into folders of a checkpoint's.
    fn find_below(folder: &Path) -> Option<Self> {
        let latest = folder.join("latest");
        // A pipe would keep who opens it waiting.
        let tag = if latest.is_file() {
            std::fs::read_to_string(latest)
        } else {
            Ok(String::new())
        };
        let tag = tag.unwrap_or_default();
        let tag = tag.trim();
        if !tag.is_empty() && tag != ".." && !tag.contains('/') {
            return Self::find_in(&folder.join(tag));
        }
        let mut models = names_in(folder);
        models.retain(|name| name.starts_with("pytorch_model_fsdp_"));
        models.iter().find_map(|model| Self::find_in(&folder.join(model)))
    }

    fn find_in(folder: &Path) -> Option<Self> {
        let mut names = names_in(folder);
        if names.iter().any(|name| name.ends_with(".safetensors")) {
            return None;
        }
        if names.iter().any(|name| is_of_torch_distributed(name)) {
            return Some(Self::TorchDistributed(folder.into()));
        }
        if names.iter().any(|name| is_of_deepspeed(name)) {
            return Some(Self::of_tag(folder));
        }
        names.retain(|name| is_pickle(name));
        // Rather the model than its optimizer.
        let pickle = names.iter().find(|name| name.contains("model")).or(names.first())?;
        Some(Self::Pickle(folder.join(pickle)))
    }

    /// Tells DeepSpeed's folder by that of a tag.
    fn of_tag(folder: &Path) -> Self {
        let tag = folder.file_name().and_then(|tag| tag.to_str()).map(str::to_owned);
        match (folder.parent(), tag) {
            (Some(parent), Some(tag)) => Self::DeepSpeed {
                folder: parent.into(),
                tag: Some(tag),
            },
            _ => Self::DeepSpeed {
                folder: folder.into(),
                tag: None,
            },
        }
    }
}

/// Returns the names in a folder, in order: folders have none of their own.
fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names = Vec::from_iter(names);
    names.sort_unstable();
    names
}

fn is_of_torch_distributed(name: &str) -> bool {
    name == ".metadata" || name.ends_with(".distcp")
}

fn is_of_deepspeed(name: &str) -> bool {
    let is_state = name.ends_with("_model_states.pt") || name.ends_with("_optim_states.pt");
    is_state && (name.contains("mp_rank_") || name.contains("zero_pp_rank_"))
}

fn is_pickle(name: &str) -> bool {
    let end = name.rsplit_once('.').map(|(_, end)| end.to_ascii_lowercase());
    end.is_some_and(|end| PICKLES.contains(&&*end))
}

/// Returns a path as one word of a shell's command.
fn quoted(path: &Path) -> String {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// Saves the tensors of a state dict, also where it lies under `model` or `state_dict`, and those that share memory.
const SAVE: &str = "s = next((s[k] for k in ('model', 'state_dict') if isinstance(s.get(k), dict)), s); \
                    save_file({k: v.clone().contiguous() for k, v in s.items() if torch.is_tensor(v)}, \
                    'model.safetensors', metadata={'format': 'pt'})";

impl fmt::Display for ForeignWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, what, command) = match self {
            Self::TorchDistributed(folder) => {
                let command = format!(
                    "python -c \"import sys, torch; from safetensors.torch import save_file; \
                     from torch.distributed.checkpoint.format_utils import dcp_to_torch_save; \
                     dcp_to_torch_save(sys.argv[1], 'model.pt'); s = torch.load('model.pt', weights_only=True); {SAVE}\" {}",
                    quoted(folder)
                );
                (folder, "a distributed checkpoint of PyTorch", command)
            }
            Self::DeepSpeed { folder, tag } => {
                let tag = tag
                    .as_ref()
                    .map_or_else(String::new, |tag| format!(" --tag {}", quoted(Path::new(tag))));
                let command = format!(
                    "python -m deepspeed.utils.zero_to_fp32 --safe_serialization{tag} {} OUTPUT_FOLDER",
                    quoted(folder)
                );
                (folder, "a checkpoint of DeepSpeed", command)
            }
            Self::Pickle(file) => {
                let command = format!(
                    "python -c \"import sys, torch; from safetensors.torch import save_file; \
                     s = torch.load(sys.argv[1], map_location='cpu', weights_only=True); {SAVE}\" {}",
                    quoted(file)
                );
                (file, "a Python pickle", command)
            }
        };
        write!(
            f,
            "{}: this is {what}, which can execute code when it is read, so Sconce does not; convert it to safetensors \
             where PyTorch is installed:\n  {command}",
            path.display()
        )
    }
}
