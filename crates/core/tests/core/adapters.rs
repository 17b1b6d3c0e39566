//! Adapters alone: trained beside a frozen base under every strategy, saved without it, and written for PEFT.

use super::checkpoints::strategy;
use super::{bits, build, flat, on_ranks};
use candle_core::{DType, Device, ModuleT, Tensor, Var};
use candle_nn::VarBuilder;
use sconce_collectives::Communicator;
use sconce_core::checkpoint::{Checkpoint, ExportOptions, LoadOptions};
use sconce_core::export::{PeftConfig, export_peft};
use sconce_core::nn::{LoraLinear, LoraOptions, lora_linear};
use sconce_core::{Accelerator, AcceleratorBuilder, Optimizer, Sgd, Unit, WeightFiles, Weights, unit};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

const ROWS: usize = 12;
const STEPS: usize = 5;
const RATE: f64 = 0.2;
const OPTIONS: LoraOptions = LoraOptions {
    rank: 2,
    alpha: 6.0,
    dropout: 0.0,
    rank_stabilized: false,
};

/// The base, as another program left it.
fn base() -> HashMap<String, Tensor> {
    let tensor = |shape: &[usize], seed: f32| {
        let value = |i: usize| (i as f32 * 0.37 + seed).sin() * 0.7;
        let count = shape.iter().product();
        Tensor::from_vec(Vec::from_iter((0..count).map(value)), shape, &Device::Cpu).unwrap()
    };
    HashMap::from([
        ("layers.0.q_proj.weight".into(), tensor(&[6, 3], 0.1)),
        ("layers.0.q_proj.bias".into(), tensor(&[6], 0.2)),
        ("layers.1.up_proj.weight".into(), tensor(&[4, 6], 0.3)),
    ])
}

fn write_base(folder: &Path) -> WeightFiles {
    let path = folder.join("base.safetensors");
    candle_core::safetensors::save(&base(), &path).unwrap();
    WeightFiles::open(&[path]).unwrap()
}

struct Model(Unit<LoraLinear>, Unit<LoraLinear>);

impl Model {
    fn new(vb: VarBuilder) -> Self {
        let layer = |name: &str, inputs, outputs, bias| {
            unit(vb.clone(), name, |vb| lora_linear(inputs, outputs, bias, &OPTIONS, vb)).unwrap()
        };
        Self(
            layer("layers.0.q_proj", 3, 6, true),
            layer("layers.1.up_proj", 6, 4, false),
        )
    }

    fn forward(&self, rows: &Tensor) -> Tensor {
        let layer =
            |layer: &Unit<LoraLinear>, xs: Tensor| layer.run(xs, |layer, xs| layer.forward_t(&xs, true)).unwrap();
        layer(&self.1, layer(&self.0, rows.clone()).tanh().unwrap())
    }
}

fn rows() -> Tensor {
    let value = |i: usize| (i as f32 * 1.7).cos();
    Tensor::from_vec(Vec::from_iter((0..ROWS * 3).map(value)), (ROWS, 3), &Device::Cpu).unwrap()
}

fn loss_of(output: &Tensor) -> Tensor {
    (output - 0.3).unwrap().sqr().unwrap().mean_all().unwrap()
}

struct Run {
    acc: Box<dyn Accelerator>,
    model: Model,
    optimizer: Optimizer,
}

/// Adapters beside the base.
fn start(communicator: Arc<dyn Communicator>, builder: AcceleratorBuilder, files: &WeightFiles) -> Run {
    let builder = builder.frozen(LoraLinear::base_parameters());
    let acc = build(builder.communicator(communicator));
    let weights = Weights::FilesAndRandom {
        files: files.clone(),
        drawn: LoraLinear::adapter_parameters(),
        seed: 3,
    };
    let model = Model::new(acc.var_builder(weights).unwrap());
    let optimizer = acc.prepare_optimizer(Box::new(sgd())).unwrap();
    Run { acc, model, optimizer }
}

fn sgd() -> Sgd {
    Sgd {
        learning_rate: RATE,
        ..Sgd::default()
    }
}

impl Run {
    fn train(&mut self, steps: usize) -> Vec<u32> {
        let share = ROWS / self.acc.world().size;
        let own = rows().narrow(0, self.acc.world().rank * share, share).unwrap();
        let step = |_| {
            let loss = loss_of(&self.model.forward(&own));
            self.acc.backward(&loss).unwrap();
            self.optimizer.step().unwrap();
            self.optimizer.zero_grad().unwrap();
            loss.to_scalar::<f32>().unwrap().to_bits()
        };
        (0..steps).map(step).collect()
    }

    fn values(&self) -> Vec<(String, Vec<f32>)> {
        let tensors = self.acc.engine().tensors(true).unwrap();
        let values = tensors.iter().map(|(name, tensor)| (name.clone(), flat(tensor)));
        values.collect()
    }
}

/// Trains the same with candle alone; `begin` has all parameters.
fn plain(begin: &HashMap<String, Tensor>) -> HashMap<String, Vec<f32>> {
    let adapters = begin.iter().filter(|(name, _)| name.contains("lora_"));
    let vars: HashMap<_, _> = adapters
        .map(|(name, tensor)| (name.clone(), Var::from_tensor(tensor).unwrap()))
        .collect();
    let layer = |name: &str, xs: &Tensor| -> candle_core::Result<Tensor> {
        let mut result = xs.matmul(&begin[&format!("{name}.weight")].t()?)?;
        if let Some(bias) = begin.get(&format!("{name}.bias")) {
            result = result.broadcast_add(bias)?;
        }
        let [a, b] = ["lora_A", "lora_B"].map(|half| &vars[&format!("{name}.{half}.weight")]);
        result + (xs.matmul(&a.t()?)?.matmul(&b.t()?)? * 3.0)?
    };
    for _ in 0..STEPS {
        let hidden = layer("layers.0.q_proj", &rows()).unwrap().tanh().unwrap();
        let gradients = loss_of(&layer("layers.1.up_proj", &hidden).unwrap())
            .backward()
            .unwrap();
        for var in vars.values() {
            let change = (gradients.get(var).unwrap() * RATE).unwrap();
            var.set(&(var.as_tensor() - change).unwrap()).unwrap();
        }
    }
    vars.iter().map(|(name, var)| (name.clone(), flat(var))).collect()
}

#[test]
fn adapters_train_as_with_candle_alone_under_every_strategy_and_the_base_stays() {
    let folder = tempfile::tempdir().unwrap();
    let files = write_base(folder.path());
    for world in 1..=3 {
        for number in 0..4 {
            let builder = || AcceleratorBuilder::default().strategy(strategy(number));
            let outcomes = on_ranks(world, |communicator| {
                let mut run = start(communicator, builder(), &files);
                let begin = run.acc.engine().tensors(true).unwrap();
                let begin = begin.into_iter().map(|(name, tensor)| (name, tensor.copy().unwrap()));
                let begin = HashMap::from_iter(begin);
                run.train(STEPS);
                (begin, run.values())
            });
            let (begin, values) = &outcomes[0];
            let expected = plain(begin);
            for (name, found) in values {
                let Some(expected) = expected.get(name) else {
                    assert_eq!(bits(found), bits(&flat(&base()[name])), "{name}");
                    continue;
                };
                assert_ne!(bits(found), bits(&flat(&begin[name])), "{name} is trained");
                let far = found
                    .iter()
                    .zip(expected)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f32::max);
                assert!(far < 1e-6, "{name}, world {world}, strategy {number}: {far}");
            }
        }
    }
}

#[test]
fn checkpoints_without_the_base_hold_adapters_alone_and_go_on_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let files = write_base(folder.path());
    let path = folder.path().join("here");
    for (from, to) in [(0, 3), (3, 1)] {
        let _ = std::fs::remove_dir_all(&path);
        let whole = on_ranks(2, |communicator| {
            let builder = AcceleratorBuilder::default()
                .strategy(strategy(from))
                .save_frozen(false);
            let mut run = start(communicator, builder, &files);
            run.train(STEPS);
            run.acc.save_state(&path).unwrap();
            let saved = run.values();
            (saved, run.train(STEPS), run.values())
        });
        let mut opened = Checkpoint::open(&path).unwrap();
        let models = opened.models();
        let names = Vec::from_iter(models[0].parameters.iter().map(|parameter| parameter.name.as_str()));
        let adapters = [
            "layers.0.q_proj.lora_A.weight",
            "layers.0.q_proj.lora_B.weight",
            "layers.1.up_proj.lora_A.weight",
            "layers.1.up_proj.lora_B.weight",
        ];
        assert_eq!(names, adapters);
        let exported = opened.export_weights(
            folder.path().join(format!("exported {from}")),
            &ExportOptions::default(),
        );
        assert_eq!(exported.unwrap().tensors, 4);
        for world in [2, 3] {
            let resumed = on_ranks(world, |communicator| {
                let builder = AcceleratorBuilder::default().strategy(strategy(to));
                let mut run = start(communicator, builder, &files);
                let loaded = run.acc.load_state(&path).unwrap();
                assert!(loaded.missing.is_empty(), "{loaded:?}");
                let loaded = run.values();
                (loaded, run.train(STEPS), run.values())
            });
            assert_eq!(resumed[0].0, whole[0].0, "{from} to {to}, {world} ranks");
            assert!(world != 2 || resumed == whole, "{from} to {to}");
        }
    }
    // A parameter that is trained here must be there.
    on_ranks(2, |communicator| {
        let acc = build(AcceleratorBuilder::default().communicator(communicator));
        let _model = Model::new(acc.var_builder(Weights::Random { seed: 1 }).unwrap());
        acc.prepare_optimizer(Box::new(sgd())).unwrap();
        let error = acc.load_state(&path).unwrap_err().to_string();
        assert!(error.contains("layers.0.q_proj.bias is not saved"), "{error}");
    });
}

#[test]
fn frozen_parameters_that_a_checkpoint_lacks_are_an_error_unless_they_are_said_to_come_from_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("half");
    // A run of one of the two layers, all of which is saved.
    let files = write_base(folder.path());
    let first = |vb: VarBuilder<'static>| lora_linear(3, 6, true, &OPTIONS, vb.pp("layers.0.q_proj")).unwrap();
    let weights = |files: &WeightFiles| Weights::FilesAndRandom {
        files: files.clone(),
        drawn: LoraLinear::adapter_parameters(),
        seed: 5,
    };
    let builder = || AcceleratorBuilder::default().frozen(LoraLinear::base_parameters());
    let acc = build(builder());
    let layer = first(acc.var_builder(weights(&files)).unwrap());
    acc.prepare_optimizer(Box::new(sgd())).unwrap();
    acc.save_state(&path).unwrap();
    let saved = flat(layer.merged_weight().as_ref().unwrap());
    let mut opened = Checkpoint::open(&path).unwrap();
    let trained_only = ExportOptions {
        trained_only: true,
        ..ExportOptions::default()
    };
    for (options, tensors) in [(&trained_only, 2), (&ExportOptions::default(), 4)] {
        let exported = opened.export_weights(folder.path().join(tensors.to_string()), options);
        assert_eq!(exported.unwrap().tensors, tensors);
    }
    let acc = build(builder());
    let vb = acc.var_builder(weights(&files)).unwrap();
    let layer = first(vb.clone());
    let _other = vb.get((4, 6), "layers.1.up_proj.weight").unwrap();
    acc.prepare_optimizer(Box::new(sgd())).unwrap();
    let error = acc.load_state(&path).unwrap_err().to_string();
    assert!(error.contains("layers.1.up_proj.weight is not saved"), "{error}");
    let options = LoadOptions {
        without_frozen: true,
        ..LoadOptions::default()
    };
    let loaded = acc.load_state_with(&path, &options).unwrap();
    assert!(loaded.missing.is_empty(), "{loaded:?}");
    assert_eq!(flat(layer.merged_weight().as_ref().unwrap()), saved);
}

#[test]
fn adapters_become_a_folder_of_peft() {
    let folder = tempfile::tempdir().unwrap();
    let files = write_base(folder.path());
    let path = folder.path().join("here");
    let kept = std::env::var_os("SCONCE_EXPORTS").map(|folder| Path::new(&folder).join("peft"));
    let outcomes = on_ranks(2, |communicator| {
        let builder = AcceleratorBuilder::default().strategy(strategy(3)).save_frozen(false);
        let mut run = start(communicator, builder, &files);
        run.train(STEPS);
        run.acc.save_state(&path).unwrap();
        (
            run.values(),
            run.acc.state_dict().unwrap(),
            flat(&run.model.forward(&rows())),
        )
    });
    let (values, state_dict, output) = &outcomes[0];
    let config = PeftConfig {
        r: 2,
        lora_alpha: 6.0,
        ..PeftConfig::default()
    };
    let (of_run, of_checkpoint) = (folder.path().join("run"), folder.path().join("checkpoint"));
    assert_eq!(export_peft(&of_run, state_dict, &config).unwrap(), 4);
    let mut checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.export_adapters(&of_checkpoint, 0, &config).unwrap(), 4);
    for name in ["adapter_model.safetensors", "adapter_config.json"] {
        let [run, checkpoint] = [&of_run, &of_checkpoint].map(|folder| std::fs::read(folder.join(name)).unwrap());
        assert_eq!(run, checkpoint, "{name}");
    }
    let text = std::fs::read_to_string(of_run.join("adapter_config.json")).unwrap();
    let written: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (key, value) in [
        ("peft_type", "LORA".into()),
        ("r", 2.into()),
        ("lora_alpha", 6.into()),
        ("target_modules", vec!["q_proj", "up_proj"].into()),
        ("task_type", serde_json::Value::Null),
        ("bias", "none".into()),
    ] {
        assert_eq!(written[key], value, "{key}");
    }
    assert_eq!(serde_json::from_str::<PeftConfig>(&text).unwrap().lora_alpha, 6.0);
    let tensors = candle_core::safetensors::load(of_run.join("adapter_model.safetensors"), &Device::Cpu).unwrap();
    let adapters = values.iter().filter(|(name, _)| name.contains("lora_"));
    for (name, values) in adapters {
        assert_eq!(&flat(&tensors[&format!("base_model.model.{name}")]), values, "{name}");
    }
    // For `python xtask/peers/check_adapters.py`.
    if let Some(kept) = kept {
        let _ = std::fs::remove_dir_all(&kept);
        export_peft(&kept, state_dict, &config).unwrap();
        let output = Tensor::from_slice(output, (ROWS, 4), &Device::Cpu).unwrap();
        let mut own = base();
        own.extend([("rows".to_owned(), rows()), ("output".to_owned(), output)]);
        candle_core::safetensors::save(&own, kept.join("base.safetensors.io")).unwrap();
    }
}

#[test]
fn what_is_no_adapter_of_peft_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |shape: (usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let refused = |tensors: &[(&str, (usize, usize))], part: &str| {
        let tensors = tensors.iter().map(|(name, shape)| ((*name).to_owned(), tensor(*shape)));
        let config = PeftConfig {
            r: 2,
            ..PeftConfig::default()
        };
        let target = folder.path().join("adapters");
        let error = export_peft(&target, &Vec::from_iter(tensors), &config)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
        assert!(!target.exists());
    };
    refused(&[("up.weight", (4, 4))], "there are no adapters");
    refused(&[("up.lora_A.weight", (2, 4))], "\"up\" has only one of");
    refused(&[("lora_A.weight", (2, 4))], "is no adapter of a layer with a name");
    refused(
        &[("up.lora_A.weight", (3, 4)), ("up.lora_B.weight", (4, 3))],
        "expected [2, in] and [out, 2]",
    );
}
