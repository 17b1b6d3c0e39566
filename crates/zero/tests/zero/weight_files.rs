//! Loading from safetensors files, sound and broken.

use super::{engine, flat};
use candle_core::{DType, Device, Tensor};
use sconce_zero::{EngineOptions, Error, ParameterSet, WeightFiles, Weights};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn ramp(shape: &[usize], dtype: DType) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| i as f32 * 0.5 - 2.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

fn write(folder: &TempDir, file: &str, tensors: &[(&str, Tensor)]) -> PathBuf {
    let path = folder.path().join(file);
    let tensors: HashMap<_, _> = tensors.iter().map(|(name, tensor)| (*name, tensor.clone())).collect();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    path
}

/// Writes a header of our own in front of `data`.
fn write_raw(folder: &TempDir, header_length: u64, header: &str, data: &[u8]) -> PathBuf {
    let path = folder.path().join("raw.safetensors");
    let bytes = [&header_length.to_le_bytes()[..], header.as_bytes(), data].concat();
    std::fs::write(&path, bytes).unwrap();
    path
}

fn load(path: &Path, name: &str, shape: &[usize]) -> candle_core::Result<Tensor> {
    let files = WeightFiles::open(&[path]).unwrap();
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    engine
        .var_builder(Weights::Files(files), DType::F32, &Device::Cpu)
        .unwrap()
        .get(shape, name)
}

#[track_caller]
fn assert_refused(path: &Path, parts: &[&str]) {
    let error = WeightFiles::open(&[path]).unwrap_err();
    assert!(matches!(error, Error::WeightFile { .. }), "{error}");
    let text = error.to_string();
    println!("{text}");
    assert!(text.starts_with(&path.display().to_string()), "{text}");
    assert_eq!(text.matches(&path.display().to_string()).count(), 1, "{text}");
    assert!(!text.contains('\n'), "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text:?}");
    }
}

#[test]
fn values_and_shapes_are_those_of_the_files_and_dtypes_are_converted() {
    let folder = tempfile::tempdir().unwrap();
    let sources = [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I64, DType::U8];
    let one = write(&folder, "1.safetensors", &[("whole.f32", ramp(&[3, 2], DType::F32))]);
    let tensors: Vec<(&str, Tensor)> = sources
        .iter()
        .map(|dtype| (dtype.as_str(), ramp(&[3, 5], *dtype)))
        .collect();
    let two = write(&folder, "2.safetensors", &tensors);
    let files = WeightFiles::open(&[one, two]).unwrap();
    assert_eq!(files.names().count(), 7);
    assert!(files.contains("bf16") && !files.contains("bf17"));
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let vb = engine
        .var_builder(Weights::Files(files), DType::F32, &Device::Cpu)
        .unwrap();
    for (name, tensor) in &tensors {
        let loaded = vb.get((3, 5), name).unwrap();
        assert_eq!((loaded.dtype(), loaded.dims()), (DType::F32, &[3, 5][..]));
        assert_eq!(flat(&loaded), flat(&tensor.to_dtype(DType::F32).unwrap()), "{name}");
    }
    let unchecked = vb.pp("whole").get_unchecked("f32").unwrap();
    assert_eq!(flat(&unchecked), flat(&ramp(&[3, 2], DType::F32)));
    assert!(vb.contains_tensor("whole.f32") && !vb.contains_tensor("whole"));
}

#[test]
fn a_missing_tensor_is_named_with_the_file_and_the_nearest_name() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        ("model.norm.weight", ramp(&[4], DType::F32)),
        ("lm_head.weight", ramp(&[4], DType::F32)),
    ];
    let path = write(&folder, "m.safetensors", &tensors);
    let text = load(&path, "model.norm.weigth", &[4]).unwrap_err().to_string();
    for part in [
        "\"model.norm.weigth\"",
        "m.safetensors",
        "did you mean \"model.norm.weight\"",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let text = load(&path, "something.else.entirely", &[4]).unwrap_err().to_string();
    assert!(!text.contains("did you mean"), "{text}");
}

#[test]
fn a_wrong_shape_is_named_with_both_shapes_and_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "m.safetensors", &[("w", ramp(&[4, 2], DType::F32))]);
    let text = load(&path, "w", &[2, 4]).unwrap_err().to_string();
    for part in ["m.safetensors", "\"w\"", "[4, 2]", "[2, 4]"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "m.safetensors", &[("w", ramp(&[4, 2], DType::F32))]);
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 1, 7, 8, 9, 20, whole.len() - 33, whole.len() - 1] {
        let cut = folder.path().join(format!("cut{length}.safetensors"));
        std::fs::write(&cut, &whole[..length]).unwrap();
        assert_refused(&cut, &["safetensors"]);
    }
}

#[test]
fn broken_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let header = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let length = header.len() as u64;
    assert_refused(&write_raw(&folder, 1 << 20, header, &[0; 8]), &[]);
    assert_refused(&write_raw(&folder, u64::MAX, header, &[0; 8]), &[]);
    assert_refused(&write_raw(&folder, length, &header.replace(':', ";"), &[0; 8]), &[]);
    assert_refused(&write_raw(&folder, length, &header.replace("F32", "X32"), &[0; 8]), &[]);
    assert_refused(&write_raw(&folder, length, &header.replace("[2]", "[3]"), &[0; 8]), &[]);
    assert_refused(
        &write_raw(&folder, length, &header.replace("[0,8]", "[8,0]"), &[0; 8]),
        &[],
    );
    let overlapping = r#"{"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    assert_refused(
        &write_raw(&folder, overlapping.len() as u64, overlapping, &[0; 12]),
        &[],
    );
    let huge = format!(
        r#"{{"w":{{"dtype":"F32","shape":[{0},{0}],"data_offsets":[0,8]}}}}"#,
        u64::MAX / 2
    );
    assert_refused(&write_raw(&folder, huge.len() as u64, &huge, &[0; 8]), &[]);
}

#[test]
fn a_file_that_does_not_exist_or_is_a_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    assert_refused(&folder.path().join("absent.safetensors"), &["No such file"]);
    assert_refused(folder.path(), &[]);
}

#[test]
fn a_tensor_in_two_files_is_refused_with_both_files() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["1.safetensors", "2.safetensors"].map(|file| write(&folder, file, &[("w", ramp(&[4], DType::F32))]));
    let text = WeightFiles::open(&paths).unwrap_err().to_string();
    for part in ["\"w\"", "1.safetensors", "2.safetensors"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn no_files_at_all_say_so_when_a_tensor_is_asked_for() {
    let files = WeightFiles::open(&[] as &[&Path]).unwrap();
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let vb = engine
        .var_builder(Weights::Files(files), DType::F32, &Device::Cpu)
        .unwrap();
    let text = vb.get(2, "w").unwrap_err().to_string();
    assert!(text.contains("\"w\""), "{text}");
}

#[test]
fn pickles_are_told_what_they_are_and_how_they_become_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["pytorch_model.bin", "model.pt"] {
        let path = folder.path().join(name);
        // As torch.save begins: a zip file.
        std::fs::write(&path, b"PK\x03\x04 and so on").unwrap();
        let error = WeightFiles::open(&[&path]).unwrap_err().to_string();
        let said = format!("{}: this is a Python pickle, which can execute code", path.display());
        assert!(error.contains(&said) && error.contains("weights_only=True"), "{error}");
    }
}

#[test]
fn parameters_to_be_drawn_need_not_be_in_the_files_and_all_others_must() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(&folder, "base.safetensors", &[("base", ramp(&[4, 3], DType::F32))]);
    let vb = |weights| {
        let engine = engine(&sconce_collectives::single(), EngineOptions::default());
        engine.var_builder(weights, DType::F32, &Device::Cpu).unwrap()
    };
    let both = vb(Weights::FilesAndRandom {
        files: WeightFiles::open(&[&file]).unwrap(),
        drawn: ParameterSet::matching(|info| info.name == "adapter"),
        seed: 6,
    });
    assert_eq!(
        flat(&both.get((4, 3), "base").unwrap()),
        flat(&ramp(&[4, 3], DType::F32))
    );
    let init = candle_nn::Init::Randn { mean: 0.0, stdev: 1.0 };
    let random = vb(Weights::Random { seed: 6 });
    let drawn = [&both, &random].map(|vb| flat(&vb.get_with_hints((2, 3), "adapter", init).unwrap()));
    assert_eq!(drawn[0], drawn[1]);
    assert!(both.contains_tensor("base") && both.contains_tensor("adapter") && !both.contains_tensor("bose"));
    let error = both.get((4, 3), "bose").unwrap_err().to_string();
    assert!(error.contains("bose") && error.contains("base"), "{error}");
}
