//! Checkpoints: runs go on from them as if they had not stopped, and what is not one is refused by name.

use super::training::dataset;
use super::{bits, build, flat, on_ranks};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use sconce_collectives::Communicator;
use sconce_core::checkpoint::{Checkpoints, LoadOptions};
use sconce_core::{
    Accelerator, AcceleratorBuilder, AdamW, DataLoader, DataParallel, GradientCompression, LinearSchedule, Optimizer,
    ParameterSet, PowerSgd, PreparedLoader, Scheduler, ShardingStrategy, TensorDataset, Unit, Weights, ZeroStage, unit,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

const ROWS: usize = 48;
const TOGETHER: usize = 12;

/// Two layers, each a unit.
pub(super) struct Model(Unit<Linear>, Unit<Linear>);

impl Model {
    pub(super) fn new(vb: VarBuilder, hidden: usize) -> Self {
        let layer = |name: &str, inputs, outputs| unit(vb.clone(), name, |vb| linear(inputs, outputs, vb)).unwrap();
        Self(layer("first", 3, hidden), layer("second", hidden, 1))
    }

    pub(super) fn loss(&self, batch: &[Tensor]) -> Tensor {
        let output = self
            .1
            .forward(&self.0.forward(&batch[0]).unwrap().tanh().unwrap())
            .unwrap();
        (output - &batch[1]).unwrap().sqr().unwrap().mean_all().unwrap()
    }
}

/// A run with everything that a checkpoint keeps.
pub(super) struct Run {
    pub(super) acc: Box<dyn Accelerator>,
    model: Model,
    optimizer: Optimizer,
    loader: PreparedLoader<TensorDataset>,
    scheduler: Scheduler<LinearSchedule>,
    /// The program's own.
    best: Arc<Mutex<f64>>,
}

pub(super) fn strategy(number: usize) -> Arc<dyn ShardingStrategy> {
    match number {
        0 => Arc::new(DataParallel),
        1 => Arc::new(ZeroStage::One),
        2 => Arc::new(ZeroStage::Two),
        _ => Arc::new(ZeroStage::Three {
            persistence_threshold: 0,
        }),
    }
}

pub(super) fn start(communicator: Arc<dyn Communicator>, builder: AcceleratorBuilder, hidden: usize) -> Run {
    let acc = build(builder.communicator(communicator));
    let model = Model::new(acc.var_builder(Weights::Random { seed: 4 }).unwrap(), hidden);
    let rule = AdamW {
        learning_rate: 0.05,
        ..AdamW::default()
    };
    let loader = DataLoader::new(dataset(ROWS).2, TOGETHER / acc.world().size).shuffle(true);
    let schedule = LinearSchedule {
        warmup_steps: 2,
        total_steps: 20,
    };
    let (optimizer, loader, scheduler) = acc.prepare(rule, loader, schedule).unwrap();
    let best = Arc::new(Mutex::new(f64::INFINITY));
    acc.register_for_checkpointing("best", best.clone()).unwrap();
    Run {
        acc,
        model,
        optimizer,
        loader,
        scheduler,
        best,
    }
}

impl Run {
    /// Trains from where it stands; calls `at` after each step. Returns the losses and learning rates.
    pub(super) fn train(&mut self, epochs: usize, mut at: impl FnMut(&dyn Accelerator, usize)) -> Vec<(u32, u64)> {
        let mut seen = Vec::new();
        for _ in 0..epochs {
            for batch in &mut self.loader {
                let loss = self.model.loss(&batch.unwrap());
                self.acc.backward(&loss).unwrap();
                let rate = self.optimizer.learning_rate();
                self.optimizer.step().unwrap();
                self.scheduler.step().unwrap();
                self.optimizer.zero_grad().unwrap();
                *self.best.lock().unwrap() = f64::from(loss.to_scalar::<f32>().unwrap()) + seen.len() as f64;
                seen.push((loss.to_scalar::<f32>().unwrap().to_bits(), rate.to_bits()));
                at(&*self.acc, seen.len());
            }
        }
        seen
    }

    pub(super) fn values(&self) -> Vec<u32> {
        let tensors = self.acc.engine().tensors(true).unwrap();
        tensors.iter().flat_map(|(_, tensor)| bits(&flat(tensor))).collect()
    }
}

#[test]
fn a_run_goes_on_in_the_middle_of_an_epoch_as_if_it_had_not_stopped() {
    for world in 1..=3 {
        for from in 0..4 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("here");
            let whole = on_ranks(world, |communicator| {
                let mut run = start(communicator, AcceleratorBuilder::default().strategy(strategy(from)), 5);
                let seen = run.train(2, |acc, step| {
                    if step == 6 {
                        acc.save_state(&path).unwrap();
                    }
                });
                (seen[6..].to_vec(), run.values(), *run.best.lock().unwrap())
            });
            for to in 0..4 {
                let resumed = on_ranks(world, |communicator| {
                    let mut run = start(
                        communicator,
                        AcceleratorBuilder::default().seed(9).strategy(strategy(to)),
                        5,
                    );
                    let loaded = run.acc.load_state(&path).unwrap();
                    assert!(loaded.missing.is_empty() && loaded.skipped.is_empty(), "{loaded:?}");
                    assert!(run.best.lock().unwrap().is_finite());
                    let seen = run.train(1, |_, _| ());
                    (seen, run.values())
                });
                for ((seen, values), whole) in resumed.iter().zip(&whole) {
                    assert_eq!(
                        (seen, values),
                        (&whole.0, &whole.1),
                        "world {world}, strategy {from} to {to}"
                    );
                }
            }
        }
    }
}

#[test]
fn other_numbers_of_ranks_load_the_same_values() {
    for from in 1..=4 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("here");
        let saved = on_ranks(from, |communicator| {
            let mut run = start(
                communicator,
                AcceleratorBuilder::default().strategy(strategy(from % 4)),
                5,
            );
            run.train(1, |_, _| ());
            run.acc.save_state(&path).unwrap();
            run.values()
        });
        for to in 1..=4 {
            for number in 0..4 {
                let losses = on_ranks(to, |communicator| {
                    let mut run = start(
                        communicator,
                        AcceleratorBuilder::default().strategy(strategy(number)),
                        5,
                    );
                    run.acc.load_state(&path).unwrap();
                    assert_eq!(run.values(), saved[0], "from {from} to {to} ranks, strategy {number}");
                    run.train(1, |_, _| ()).len()
                });
                assert_eq!(losses, vec![ROWS / TOGETHER; to]);
            }
        }
    }
}

fn save(folder: &Path) -> std::path::PathBuf {
    let mut paths = on_ranks(2, |communicator| {
        let mut run = start(communicator, AcceleratorBuilder::default().strategy(strategy(3)), 5);
        run.train(1, |_, _| ());
        run.acc.save_state(folder.join("checkpoint_7")).unwrap()
    });
    paths.remove(0)
}

/// What every rank is told when it loads.
fn refusal(path: &Path) -> Vec<String> {
    on_ranks(2, |communicator| {
        let run = start(communicator, AcceleratorBuilder::default(), 5);
        let before = run.values();
        let error = run.acc.load_state(path).unwrap_err().to_string();
        if !error.contains("damaged") {
            assert_eq!(run.values(), before, "nothing is loaded in part");
        }
        error
    })
}

#[track_caller]
fn assert_refused(path: &Path, parts: &[&str]) {
    let told = refusal(path);
    assert!(
        parts.iter().all(|part| told.iter().any(|text| text.contains(part))),
        "{parts:?} in {told:?}"
    );
}

#[test]
fn damaged_files_are_refused_with_the_file_and_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path());
    let file = path.join("rank-00001.safetensors");
    let whole = fs::read(&file).unwrap();
    let last = whole.len() - 1;
    let mut flipped = whole.clone();
    flipped[last] ^= 1;
    fs::write(&file, &flipped).unwrap();
    assert_refused(
        &path,
        &["rank-00001.safetensors", "tensor \"0/", "are not what was written"],
    );
    fs::write(&file, &whole[..last]).unwrap();
    assert_refused(&path, &["rank-00001.safetensors has", "it is not whole"]);
    let mut header = whole.clone();
    header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&file, &header).unwrap();
    assert_refused(
        &path,
        &["rank-00001.safetensors", "a header of 18446744073709551615 bytes"],
    );
    fs::write(&file, vec![b'x'; whole.len()]).unwrap();
    assert_refused(&path, &["rank-00001.safetensors", "a header of"]);
    fs::remove_file(&file).unwrap();
    assert_refused(&path, &["rank-00001.safetensors", "No such file"]);
}

#[test]
fn indexes_that_are_damaged_foreign_newer_or_hostile_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path());
    let index = path.join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, &text[..text.len() / 2]).unwrap();
    assert_refused(&path, &["index.json: not whole"]);
    let (hash, rest) = text.split_once("\",\n").unwrap();
    assert!(hash.starts_with("{\n  \"blake3\": \""), "{hash}");
    fs::write(&index, text.replacen("\"draws\": ", "\"draws\": 1", 1)).unwrap();
    assert_refused(&path, &["index.json: its contents are not what was written"]);
    fs::write(&index, text.replacen(": \"", ": \"0", 1)).unwrap();
    assert_refused(&path, &["index.json: its contents are not what was written"]);
    // As older programs wrote it, and hostile ones may.
    let text = format!("{{\n{rest}");
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        fs::write(&index, text.replacen(from, to, 1)).unwrap();
    };
    fs::write(&index, "{\"format\": \"pt\"}").unwrap();
    assert_refused(&path, &["it is not the index of a Sconce checkpoint"]);
    changed("\"version\": 1", "\"version\": 2");
    assert_refused(&path, &["version 2 is newer than this program"]);
    changed("\"files\": {", "\"files\": {\"../../etc/passwd\": 1,");
    assert_refused(&path, &["leaves the checkpoint's folder"]);
    changed("\"start\": 0", "\"start\": 1");
    assert_refused(&path, &["are out of turn"]);
    changed("\"end\": 8", "\"end\": 18446744073709551615");
    assert_refused(&path, &["out of turn"]);
    changed("\"shape\": [", "\"shape\": [9223372036854775807, 9223372036854775807,");
    assert_refused(&path, &["is too large"]);
    changed("\"version\": 1", "\"version\": 1");
    on_ranks(2, |communicator| {
        let run = start(communicator, AcceleratorBuilder::default(), 5);
        run.acc.load_state(&path).unwrap();
    });
}

#[test]
fn another_model_is_refused_with_all_differences_or_loaded_in_part() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path());
    on_ranks(2, |communicator| {
        let run = start(communicator, AcceleratorBuilder::default(), 6);
        let error = run.acc.load_state(&path).unwrap_err().to_string();
        assert!(
            error.contains("first.weight is saved as [5, 3], here it is [6, 3]") && error.contains("second.weight"),
            "{error}"
        );
    });
    // Renamed, weights alone.
    on_ranks(2, |communicator| {
        let acc = build(AcceleratorBuilder::default().communicator(communicator));
        let vb = acc.var_builder(Weights::Random { seed: 8 }).unwrap();
        let layer = linear(3, 5, vb.pp("other")).unwrap();
        acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
        let names = [("other.weight", "first.weight"), ("other.bias", "first.bias")];
        let options = LoadOptions {
            weights_only: true,
            partial: true,
            without_frozen: false,
            renamed: names
                .map(|(own, saved)| (own.to_owned(), saved.to_owned()))
                .into_iter()
                .collect::<BTreeMap<_, _>>(),
        };
        let before = flat(layer.weight());
        let loaded = acc.load_state_with(&path, &options).unwrap();
        assert_ne!(flat(layer.weight()), before);
        assert!(
            loaded
                .missing
                .iter()
                .any(|text| text.contains("second.weight is saved")),
            "{loaded:?}"
        );
    });
}

#[test]
fn numbered_checkpoints_are_pruned_when_the_next_is_there_and_the_newest_whole_one_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints {
        folder: folder.path().join("checkpoints"),
        total_limit: Some(2),
    };
    let builder = || AcceleratorBuilder::default().checkpoints(checkpoints.clone());
    on_ranks(2, |communicator| {
        let mut run = start(communicator, builder(), 5);
        assert_eq!(run.acc.load_latest().unwrap(), None);
        run.train(1, |acc, step| {
            let path = if step % 2 == 0 {
                acc.save_checkpoint()
            } else {
                acc.save_checkpoint_in_background()
            };
            assert!(path.unwrap().ends_with(format!("checkpoint_{}", step - 1)));
        });
        run.acc.finish_saving().unwrap();
    });
    let names = || {
        let entries = fs::read_dir(&checkpoints.folder).unwrap();
        let mut names = Vec::from_iter(entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
        names.sort();
        names
    };
    assert_eq!(names(), [".lock", "checkpoint_2", "checkpoint_3", "latest"]);
    assert_eq!(
        fs::read_to_string(checkpoints.folder.join("latest")).unwrap(),
        "checkpoint_3"
    );
    // What a killed save leaves is no checkpoint; a damaged one is skipped, and why is told.
    fs::create_dir(checkpoints.folder.join(".checkpoint_4.partial")).unwrap();
    fs::remove_file(checkpoints.folder.join("checkpoint_3/rank-00000.safetensors")).unwrap();
    on_ranks(2, |communicator| {
        let run = start(communicator, builder(), 5);
        let loaded = run.acc.load_latest().unwrap().unwrap();
        assert!(loaded.folder.ends_with("checkpoint_2"));
        assert_eq!(run.acc.load_state(&checkpoints.folder).unwrap(), loaded);
        assert!(
            loaded.skipped.len() == 1 && loaded.skipped[0].contains("rank-00000.safetensors"),
            "{loaded:?}"
        );
        assert!(run.acc.save_checkpoint().unwrap().ends_with("checkpoint_4"));
    });
    let nothing = tempfile::tempdir().unwrap();
    assert_refused(nothing.path(), &["no complete checkpoint in"]);
    assert_refused(&nothing.path().join("absent"), &["absent", "No such file"]);
}

#[test]
fn a_rank_that_cannot_write_fails_all_and_a_failure_in_the_background_is_told_by_the_next_call() {
    let folder = tempfile::tempdir().unwrap();
    let (blocked, numbered) = (folder.path().join("file"), folder.path().join("numbered"));
    fs::write(&blocked, "in the way").unwrap();
    on_ranks(2, |communicator| {
        let checkpoints = Checkpoints {
            folder: numbered.clone(),
            total_limit: None,
        };
        let mut run = start(communicator, AcceleratorBuilder::default().checkpoints(checkpoints), 5);
        run.train(1, |_, _| ());
        assert!(run.acc.save_state(blocked.join("here")).is_err());
        let existing = run.acc.save_state(folder.path()).unwrap_err().to_string();
        assert!(
            !run.acc.is_main_process() || existing.contains("it exists already"),
            "{existing}"
        );
        run.acc
            .together(if run.acc.is_main_process() {
                fs::remove_dir_all(&numbered).and_then(|()| fs::write(&numbered, "in the way"))
            } else {
                Ok(())
            })
            .unwrap();
        assert!(run.acc.save_checkpoint_in_background().is_err() || run.acc.finish_saving().is_err());
        run.acc.wait_for_everyone().unwrap();
    });
}

#[test]
fn several_models_are_saved_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("both");
    let two = |acc: &dyn Accelerator, seed| {
        let other = acc.for_another_model(ParameterSet::none()).unwrap();
        let layers =
            [acc, &*other].map(|acc| linear(2, 2, acc.var_builder(Weights::Random { seed }).unwrap()).unwrap());
        acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
        other.prepare_optimizer(Box::new(AdamW::default())).unwrap();
        (other, layers)
    };
    let values = on_ranks(2, |communicator| {
        let acc = build(AcceleratorBuilder::default().communicator(communicator));
        let (other, layers) = two(&*acc, 1);
        let ones = Tensor::ones((1, 2), DType::F32, &Device::Cpu).unwrap();
        other
            .backward(&layers[1].forward(&ones).unwrap().sqr().unwrap().mean_all().unwrap())
            .unwrap();
        acc.save_state(&path).unwrap();
        layers.map(|layer| flat(layer.weight()))
    });
    let found = on_ranks(3, |communicator| {
        let acc = build(AcceleratorBuilder::default().communicator(communicator));
        let (_other, layers) = two(&*acc, 2);
        acc.load_state(&path).unwrap();
        layers.map(|layer| flat(layer.weight()))
    });
    assert!(found.iter().all(|found| *found == values[0]));
}

/// Reads an index as one whose hash does not stand in the way of changing it.
fn without_hash(index: &Path) -> serde_json::Value {
    let mut value: serde_json::Value = serde_json::from_str(&fs::read_to_string(index).unwrap()).unwrap();
    value.as_object_mut().unwrap().remove("blake3").unwrap();
    value
}

#[test]
fn an_index_that_lacks_a_part_of_what_was_saved_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path());
    let index = path.join("index.json");
    let whole = without_hash(&index);
    let refused = |part: &str, change: fn(&mut serde_json::Value)| {
        let mut changed = whole.clone();
        change(&mut changed["models"][0]);
        fs::write(&index, changed.to_string()).unwrap();
        assert_refused(&path, &[part]);
    };
    refused("first.weight has no exp_avg", |model| {
        model["parameters"]["first.weight"]["arrays"]
            .as_object_mut()
            .unwrap()
            .remove("exp_avg");
    });
    refused("first.weight has optimizer state and no count of steps", |model| {
        model["steps"].as_object_mut().unwrap().remove("first.weight");
    });
    refused("has taken 9223372036854775808 steps", |model| {
        model["steps"]["first.weight"] = (1u64 << 63).into();
    });
    refused("the order of gradients", |model| {
        model["gradient_order"] = vec!["x"; 4].into();
    });
    refused("the order of gradients", |model| {
        model["gradient_order"] = vec!["first.weight"; 4].into();
    });
}

#[test]
fn a_folder_that_cannot_hold_checkpoints_is_told_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("file");
    fs::write(&blocked, "in the way").unwrap();
    let outcomes = on_ranks(2, |communicator| {
        let checkpoints = Checkpoints {
            folder: blocked.clone(),
            total_limit: None,
        };
        let builder = AcceleratorBuilder::default()
            .checkpoints(checkpoints)
            .communicator(communicator);
        builder.build_with(|_| None).unwrap_err().to_string()
    });
    assert!(
        outcomes[0].contains("checkpoints cannot be written here"),
        "{outcomes:?}"
    );
}

#[test]
fn gradients_that_power_sgd_compresses_go_on_as_if_the_run_had_not_stopped() {
    let builder = || {
        AcceleratorBuilder::default().gradient_compression(GradientCompression::PowerSgd(PowerSgd {
            start_iteration: 1,
            min_compression_rate: 0.1,
            ..PowerSgd::default()
        }))
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here");
    let whole = on_ranks(2, |communicator| {
        let mut run = start(communicator, builder(), 5);
        let seen = run.train(2, |acc, step| {
            if step == 6 {
                acc.save_state(&path).unwrap();
            }
        });
        (seen[6..].to_vec(), run.values())
    });
    for world in [2, 3] {
        let resumed = on_ranks(world, |communicator| {
            let mut run = start(communicator, builder(), 5);
            let loaded = run.acc.load_state(&path).unwrap();
            assert!(loaded.missing.is_empty(), "{loaded:?}");
            (run.train(1, |_, _| ()), run.values())
        });
        assert!(world != 2 || resumed == whole);
    }
    // Errors of one rank alone are not what training is owed.
    let index = path.join("index.json");
    let mut changed = without_hash(&index);
    let arrays = &mut changed["models"][0]["parameters"]["first.weight"]["arrays"];
    arrays.as_object_mut().unwrap().remove("power_sgd_error.1").unwrap();
    fs::write(&index, changed.to_string()).unwrap();
    assert_refused(&path, &["first.weight has errors of PowerSGD of 1 ranks, expected 2"]);
}

#[test]
fn pipes_and_devices_in_the_place_of_files_are_refused_and_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path());
    for name in ["rank-00001.safetensors", "index.json"] {
        let file = path.join(name);
        fs::remove_file(&file).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &file,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        assert_refused(&path, &[name, "is not a file"]);
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
        assert_refused(&path, &[name, "is not a file"]);
    }
}
