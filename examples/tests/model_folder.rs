//! Model folders: what is opened, what is refused, and that what is written is read back bit for bit.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use sconce_examples::huggingface::{ModelFolder, check_model_folder_is_free, write_model_folder};
use serde_json::{Value, json};
use tempfile::TempDir;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama/model")
}

fn write_shard(folder: &TempDir, shard: &str, names: &[&str]) -> Result<()> {
    let tensors: HashMap<String, Tensor> = names
        .iter()
        .map(|name| Ok((name.to_string(), Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?)))
        .collect::<Result<_>>()?;
    candle_core::safetensors::save(&tensors, folder.path().join(shard))?;
    Ok(())
}

/// A folder with two shards holding `a`, `b` and `c`, and the given index over them.
fn sharded(weight_map: Value) -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("config.json"), "{}")?;
    write_shard(&folder, "model-00001-of-00002.safetensors", &["a", "b"])?;
    write_shard(&folder, "model-00002-of-00002.safetensors", &["c"])?;
    let index = json!({"metadata": {"total_size": 72}, "weight_map": weight_map});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string())?;
    Ok(folder)
}

fn error_of(folder: &TempDir) -> String {
    format!("{:#}", ModelFolder::open(folder.path()).unwrap_err())
}

#[test]
fn a_folder_with_one_weight_file_is_opened() -> Result<()> {
    let folder = ModelFolder::open(&fixture())?;
    assert_eq!(folder.weights, [fixture().join("model.safetensors")]);
    assert_eq!(folder.tokenizer, None);
    assert_eq!(serde_json::from_str::<Value>(&folder.config)?["hidden_size"], 64);
    Ok(())
}

#[test]
fn a_folder_with_shards_is_opened() -> Result<()> {
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let folder = sharded(json!({"a": first, "b": first, "c": second}))?;
    fs::write(folder.path().join("tokenizer.json"), "{}")?;
    let opened = ModelFolder::open(folder.path())?;
    assert_eq!(opened.weights, [folder.path().join(first), folder.path().join(second)]);
    assert_eq!(opened.tokenizer, Some(folder.path().join("tokenizer.json")));
    Ok(())
}

#[test]
fn an_index_cannot_name_a_file_outside_its_folder() -> Result<()> {
    for name in [
        "../../etc/passwd",
        "../model.safetensors",
        "/tmp/model.safetensors",
        "sub/model.safetensors",
        "./model.safetensors",
        "model.safetensors/",
        "..\\model.safetensors",
        "C:model.safetensors",
        "model\0.safetensors",
        "..",
        ".",
        "",
        "config.json",
    ] {
        let folder = sharded(json!({"a": name}))?;
        let error = error_of(&folder);
        assert!(error.contains("model.safetensors.index.json"), "{name}: {error}");
        assert!(
            error.contains("`a`") && error.contains(&format!("{name:?}")),
            "{name}: {error}"
        );
    }
    Ok(())
}

#[test]
fn an_index_that_does_not_match_its_shards_is_an_error() -> Result<()> {
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let missing_shard = sharded(json!({"a": first, "b": first, "c": "model-00003-of-00002.safetensors"}))?;
    assert!(error_of(&missing_shard).contains("model-00003-of-00002.safetensors: is listed in"));
    let missing_tensor = sharded(json!({"a": first, "b": first, "c": second, "d": second}))?;
    assert!(error_of(&missing_tensor).contains("has no tensor `d`"));
    let unlisted_tensor = sharded(json!({"a": first, "c": second}))?;
    assert!(error_of(&unlisted_tensor).contains("holds a tensor `b`"));
    assert!(error_of(&sharded(json!({}))?).contains("`weight_map` is empty"));
    assert!(error_of(&sharded(json!({"a": 3}))?).contains("model.safetensors.index.json"));
    Ok(())
}

#[test]
fn a_folder_without_config_or_weights_is_an_error() -> Result<()> {
    let folder = tempfile::tempdir()?;
    assert!(error_of(&folder).contains("config.json"));
    fs::write(folder.path().join("config.json"), "{}")?;
    let error = error_of(&folder);
    assert!(
        error.contains("model.safetensors or model.safetensors.index.json"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_damaged_weight_file_is_an_error_with_its_name_and_never_a_panic() -> Result<()> {
    let whole = fs::read(fixture().join("model.safetensors"))?;
    let header_bytes = u64::from_le_bytes(whole[..8].try_into()?) as usize;
    let mut damaged: Vec<Vec<u8>> = [0, 7, 8, 9, 8 + header_bytes / 2, 8 + header_bytes, whole.len() - 1]
        .iter()
        .map(|length| whole[..*length].to_vec())
        .collect();
    damaged.push([&whole[..], b"x"].concat());
    damaged.push([&u64::MAX.to_le_bytes(), &whole[8..]].concat());
    for header in [
        r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551615]}}"#,
        r#"{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#,
        "[]",
        "\u{0}\u{0}",
    ] {
        damaged.push([&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 4]].concat());
    }
    for bytes in damaged {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("config.json"), "{}")?;
        let path = folder.path().join("model.safetensors");
        fs::write(&path, &bytes)?;
        let error = error_of(&folder);
        assert!(error.starts_with(&path.display().to_string()), "{error}");
        assert!(error.contains("not a complete safetensors file"), "{error}");
    }
    Ok(())
}

#[test]
fn a_written_folder_is_read_back_bit_for_bit() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let target = parent.path().join("deeper/trained");
    let source = ModelFolder::open(&fixture())?;
    let tensors = candle_core::safetensors::load(&source.weights[0], &Device::Cpu)?;
    write_model_folder(&target, &source, tensors.clone())?;

    let written = ModelFolder::open(&target)?;
    let bits = |tensor: &Tensor| -> Result<Vec<u32>> {
        Ok(tensor
            .flatten_all()?
            .to_vec1::<f32>()?
            .into_iter()
            .map(f32::to_bits)
            .collect())
    };
    let read = candle_core::safetensors::load(&written.weights[0], &Device::Cpu)?;
    assert_eq!(read.len(), tensors.len());
    for (name, tensor) in &tensors {
        assert_eq!(read[name].dims(), tensor.dims(), "{name}");
        assert_eq!(bits(&read[name])?, bits(tensor)?, "{name}");
    }
    // The fixture was written by transformers: same tensors, same metadata, so the same bytes in another order at most.
    assert_eq!(
        fs::metadata(&written.weights[0])?.len(),
        fs::metadata(&source.weights[0])?.len()
    );
    assert!(fs::read_to_string(target.join("generation_config.json"))?.contains("use_cache"));
    assert_eq!(
        serde_json::from_str::<Value>(&written.config)?,
        serde_json::from_str::<Value>(&source.config)?
    );
    assert_eq!(
        fs::read_dir(target.parent().expect("it has one"))?.count(),
        1,
        "nothing unfinished is left"
    );
    Ok(())
}

#[test]
fn a_written_weight_file_says_that_its_format_is_pt() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let target = parent.path().join("trained");
    let one = Tensor::ones(3, DType::F32, &Device::Cpu)?;
    write_model_folder(&target, &ModelFolder::open(&fixture())?, [("one".to_owned(), one)])?;
    let bytes = fs::read(target.join("model.safetensors"))?;
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes)?;
    assert_eq!(
        metadata.metadata(),
        &Some(HashMap::from([("format".to_owned(), "pt".to_owned())]))
    );
    Ok(())
}

#[test]
fn tied_tensors_are_written_once_under_the_first_name() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let target = parent.path().join("trained");
    let tied = Tensor::ones(3, DType::F32, &Device::Cpu)?;
    let tensors = ["embedding", "head"].map(|name| (name.to_owned(), tied.clone()));
    write_model_folder(&target, &ModelFolder::open(&fixture())?, tensors)?;
    let read = candle_core::safetensors::load(target.join("model.safetensors"), &Device::Cpu)?;
    assert_eq!(read.keys().collect::<Vec<_>>(), ["embedding"]);
    Ok(())
}

#[test]
fn folders_of_pickles_are_refused_with_their_conversion() -> Result<()> {
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("config.json"), "{}")?;
    fs::write(folder.path().join("pytorch_model.bin"), "not read")?;
    let error = error_of(&folder);
    assert!(error.contains("pytorch_model.bin: this is a Python pickle"), "{error}");
    assert!(error.contains("weights_only=True"), "{error}");
    Ok(())
}

#[test]
fn the_written_config_has_the_dtype_of_the_weights_under_the_key_it_had() -> Result<()> {
    for (config, key, other) in [
        (r#"{"dtype": "float32", "hidden_size": 64}"#, "dtype", "torch_dtype"),
        (
            r#"{"torch_dtype": "float32", "hidden_size": 64}"#,
            "torch_dtype",
            "dtype",
        ),
        (r#"{"hidden_size": 64}"#, "dtype", "torch_dtype"),
    ] {
        let parent = tempfile::tempdir()?;
        let target = parent.path().join("trained");
        let source = ModelFolder {
            config: config.to_owned(),
            ..ModelFolder::open(&fixture())?
        };
        let weight = Tensor::ones(3, DType::BF16, &Device::Cpu)?;
        write_model_folder(&target, &source, [("weight".to_owned(), weight)])?;
        let written: Value = serde_json::from_str(&fs::read_to_string(target.join("config.json"))?)?;
        assert_eq!(written[key], "bfloat16");
        assert_eq!(written.get(other), None);
        assert_eq!(written["hidden_size"], 64);
    }
    Ok(())
}

#[test]
fn a_folder_with_content_is_never_overwritten() -> Result<()> {
    let target = tempfile::tempdir()?;
    check_model_folder_is_free(target.path())?;
    fs::write(target.path().join("notes.txt"), "mine")?;
    let source = ModelFolder::open(&fixture())?;
    let weight = || Tensor::ones(3, DType::F32, &Device::Cpu);
    let error = write_model_folder(target.path(), &source, [("weight".to_owned(), weight()?)]).unwrap_err();
    assert!(format!("{error:#}").contains("is not empty"), "{error:#}");
    assert_eq!(fs::read_to_string(target.path().join("notes.txt"))?, "mine");
    assert!(check_model_folder_is_free(&target.path().join("notes.txt")).is_err());
    Ok(())
}

#[test]
fn a_failed_write_leaves_neither_a_folder_nor_a_temporary_one() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let target = parent.path().join("trained");
    let source = ModelFolder::open(&fixture())?;
    let weight = Tensor::ones(3, DType::F32, &Device::Cpu)?;
    let twice = [
        ("weight".to_owned(), weight.clone()),
        ("weight".to_owned(), weight.clone()),
    ];
    let error = write_model_folder(&target, &source, twice).unwrap_err();
    assert!(format!("{error:#}").contains("`weight` was given twice"));
    let reserved = [("__metadata__".to_owned(), weight.clone())];
    let error = write_model_folder(&target, &source, reserved).unwrap_err();
    assert!(
        format!("{error:#}").contains("`__metadata__`, which is no tensor's name"),
        "{error:#}"
    );
    assert!(write_model_folder(&target, &source, []).is_err());
    // Fails in the middle, after the temporary folder was made: a companion file that cannot be read.
    let odd = ModelFolder {
        directory: parent.path().join("odd"),
        ..source
    };
    fs::create_dir(&odd.directory)?;
    std::os::unix::fs::symlink("/proc/self/mem", odd.directory.join("tokenizer.json"))?;
    let error = write_model_folder(&target, &odd, [("weight".to_owned(), weight)]).unwrap_err();
    assert!(format!("{error:#}").contains("tokenizer.json"), "{error:#}");
    let left: Vec<_> = fs::read_dir(parent.path())?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<_, _>>()?;
    assert_eq!(left, ["odd"]);
    Ok(())
}
