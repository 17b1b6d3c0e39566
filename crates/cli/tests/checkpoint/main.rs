//! `sconce checkpoint` and `sconce merge-weights` as their users see them, over checkpoints of real runs.

mod damage;
mod diff;
mod foreign;
mod inspect;
mod merging;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, linear};
use sconce_core::{AcceleratorBuilder, AdamW, Error, ParameterSet, Unit, Weights, ZeroStage, launch_threads, unit};
use tempfile::TempDir;

/// What a run saves.
struct Run<'a> {
    ranks: usize,
    seed: u64,
    /// Units in the hidden layer.
    hidden: usize,
    steps: usize,
    /// A checkpoint to go on from.
    from: Option<&'a Path>,
    /// A second model beside the first.
    has_second: bool,
}

impl Default for Run<'_> {
    fn default() -> Self {
        Self {
            ranks: 2,
            seed: 4,
            hidden: 5,
            steps: 1,
            from: None,
            has_second: false,
        }
    }
}

impl Run<'_> {
    /// Trains two layers under ZeRO-3, of which one bias is frozen, and saves; returns names and bits of the state dict.
    fn save(&self, to: &Path) -> Vec<(String, Vec<u32>)> {
        let mut all = launch_threads(self.ranks, |builder| self.rank(builder, to)).unwrap();
        all.remove(0)
    }

    fn rank(&self, builder: AcceleratorBuilder, to: &Path) -> Result<Vec<(String, Vec<u32>)>, Error> {
        let sharded = ZeroStage::Three {
            persistence_threshold: 0,
        };
        let frozen = ParameterSet::matching(|parameter| parameter.name == "first.bias");
        let acc = builder.strategy(sharded).frozen(frozen).build_with(|_| None)?;
        let vb = acc.var_builder(Weights::Random { seed: self.seed })?;
        let layer = |name: &str, inputs, outputs| unit(vb.clone(), name, |vb| linear(inputs, outputs, vb));
        let layers: [Unit<Linear>; 2] = [layer("first", 3, self.hidden)?, layer("second", self.hidden, 1)?];
        let mut optimizer = acc.prepare_optimizer(Box::new(AdamW::default()))?;
        let second = match self.has_second {
            true => {
                let second = acc.for_another_model(ParameterSet::none())?;
                let layer = linear(2, 2, second.var_builder(Weights::Random { seed: 1 })?)?;
                Some((second.prepare_optimizer(Box::new(AdamW::default()))?, second, layer))
            }
            false => None,
        };
        if let Some(from) = self.from {
            acc.load_state(from)?;
        }
        for _ in 0..self.steps {
            let ones = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
            let output = layers[1].forward(&layers[0].forward(&ones)?.tanh()?)?;
            acc.backward(&output.sqr()?.mean_all()?)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        acc.save_state(to)?;
        drop(second);
        let bits = |tensor: &Tensor| -> Result<Vec<u32>, Error> {
            let values = tensor.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.into_iter().map(f32::to_bits).collect())
        };
        let tensors = acc.engine().tensors(true)?;
        tensors
            .into_iter()
            .map(|(name, tensor)| Ok((name, bits(&tensor)?)))
            .collect()
    }
}

/// Where the values begin in a file of safetensors: after a number of 8 bytes, the header's length, and the header.
fn values_start(file: &[u8]) -> usize {
    8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize
}

/// A folder for a test, and the command run in it.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A checkpoint `here` of two ranks.
    fn saved() -> Self {
        let place = Self::new();
        Run::default().save(&place.path("here"));
        place
    }

    /// Changes the bytes of a file.
    fn spoil(&self, file: &str, change: impl FnOnce(&mut [u8])) {
        let path = self.path(file);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(path, bytes).unwrap();
    }

    /// Runs `sconce WORDS...` in the folder.
    fn sconce(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
        command.args(words).current_dir(&self.0).output().unwrap()
    }

    /// Runs it; returns the code, stdout and stderr.
    fn outcome(&self, words: &[&str]) -> (i32, String, String) {
        let output = self.sconce(words);
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let code = output.status.code().expect("no signal ends it");
        (code, text(output.stdout), text(output.stderr))
    }

    #[track_caller]
    fn printed(&self, words: &[&str]) -> String {
        let (code, stdout, stderr) = self.outcome(words);
        assert!(code == 0 && stderr.is_empty(), "{words:?}: {code}\n{stdout}\n{stderr}");
        stdout
    }

    /// Asserts that a command fails, with all of `parts` in what it says, without a panic or an output folder.
    #[track_caller]
    fn assert_refused(&self, words: &[&str], parts: &[&str]) {
        let (code, stdout, stderr) = self.outcome(words);
        assert_eq!(code, 1, "{words:?}\n{stdout}\n{stderr}");
        assert!(stderr.contains("error: ") && !stderr.contains("panicked"), "{stderr}");
        for part in parts {
            assert!(stderr.contains(part), "{words:?}: {part:?} is not in\n{stderr}");
        }
        assert!(!self.path("out").exists(), "{words:?}");
    }

    /// Asserts it of all commands that read a checkpoint.
    #[track_caller]
    fn assert_all_refuse(&self, folder: &str, parts: &[&str]) {
        self.assert_refused(&["checkpoint", "inspect", folder], parts);
        self.assert_readers_refuse(folder, parts);
    }

    /// Asserts it of the commands that read values.
    #[track_caller]
    fn assert_readers_refuse(&self, folder: &str, parts: &[&str]) {
        self.assert_refused(&["checkpoint", "verify", folder], parts);
        self.assert_refused(&["checkpoint", "diff", folder, folder], parts);
        self.assert_refused(&["merge-weights", folder, "out"], parts);
    }

    /// Returns the text of an index as older programs wrote it: without a hash that would stand in the way of changing it.
    fn index_without_hash(&self, folder: &str) -> String {
        let text = fs::read_to_string(self.path(folder).join("index.json")).unwrap();
        let (_, rest) = text.split_once("\",\n").expect("the hash is first");
        assert!(text.starts_with("{\n  \"blake3\": \""), "{text}");
        format!("{{\n{rest}")
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        let mut names = Vec::from_iter(entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
        names.sort();
        names
    }
}
