//! `sconce merge-weights`: what is written, compared with what the engines gave and with the safetensors crate.

use super::{Place, Run};
use candle_core::{DType, Device, Tensor};
use candle_nn::linear_no_bias;
use sconce_core::{AdamW, WeightFiles, Weights, launch_threads};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

fn load(file: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// The same trained state, saved by 1, 2 and 3 ranks.
fn saved_by_three_worlds(place: &Place) -> Vec<(String, Vec<u32>)> {
    let trained = Run {
        ranks: 1,
        steps: 3,
        ..Run::default()
    };
    let state = trained.save(&place.path("by_1"));
    for ranks in [2, 3] {
        let copy = Run {
            ranks,
            steps: 0,
            seed: 9,
            from: Some(&place.path("by_1")),
            ..Run::default()
        };
        assert_eq!(copy.save(&place.path(&format!("by_{ranks}"))), state);
    }
    state
}

#[test]
fn any_number_of_ranks_gives_the_same_bytes_and_the_values_of_the_state_dict() {
    let place = Place::new();
    let state = saved_by_three_worlds(&place);
    for ranks in 1..=3 {
        let (from, to) = (format!("by_{ranks}"), format!("out_{ranks}"));
        let printed = place.printed(&["merge-weights", &from, &to]);
        assert_eq!(printed, format!("{to}: 4 tensors in model.safetensors\n"));
        assert_eq!(place.names(&to), ["model.safetensors"]);
    }
    let bytes = |ranks| fs::read(place.path(&format!("out_{ranks}/model.safetensors"))).unwrap();
    assert!(bytes(1) == bytes(2) && bytes(1) == bytes(3));
    let loaded = load(&place.path("out_1/model.safetensors"));
    assert_eq!(loaded.len(), state.len());
    for (name, values) in &state {
        assert_eq!(bits(&loaded[name]), *values, "{name}");
    }
    // The whole file is what the crate of the format writes for these tensors.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let expected = safetensors::serialize(&loaded, Some(metadata)).unwrap();
    assert_eq!(bytes(1), expected);
}

/// 4.8 MB: several blocks, and several pieces of every command, that no boundary of ranks is a multiple of.
#[test]
fn tensors_of_many_blocks_are_read_whole() {
    let place = Place::new();
    let large = Run {
        ranks: 1,
        hidden: 400_001,
        ..Run::default()
    };
    let state = large.save(&place.path("by_1"));
    let copy = Run {
        ranks: 3,
        steps: 0,
        from: Some(&place.path("by_1")),
        ..large
    };
    copy.save(&place.path("by_3"));
    for folder in ["by_1", "by_3"] {
        place.printed(&["checkpoint", "verify", folder]);
        place.printed(&["merge-weights", folder, "out"]);
        let loaded = load(&place.path("out/model.safetensors"));
        for (name, values) in &state {
            assert!(bits(&loaded[name]) == *values, "{name}");
        }
        fs::remove_dir_all(place.path("out")).unwrap();
    }
    place.printed(&["checkpoint", "diff", "by_1", "by_3"]);
    place.spoil("by_3/rank-00002.safetensors", |bytes| *bytes.last_mut().unwrap() ^= 1);
    let parts = ["rank-00002.safetensors: tensor \"0/", "are not what was written"];
    place.assert_refused(&["checkpoint", "verify", "by_3"], &parts);
    place.assert_refused(&["checkpoint", "diff", "by_1", "by_3"], &parts);
}

#[test]
fn shards_and_their_index_are_those_of_transformers() {
    let place = Place::new();
    let state = saved_by_three_worlds(&place);
    // In order: first.bias 20 bytes, first.weight 60, second.bias 4, second.weight 20. The second is larger than a shard,
    // and does not end the first: `split_torch_state_dict_into_shards` gives these.
    for ranks in [1, 3] {
        let (from, to) = (format!("by_{ranks}"), format!("shards_{ranks}"));
        let printed = place.printed(&["merge-weights", &from, &to, "--max_shard_size", "30"]);
        assert!(printed.ends_with("model.safetensors.index.json\n"), "{printed}");
    }
    let file = |number| format!("model-{number:05}-of-00003.safetensors");
    let expected = [file(1), file(2), file(3), "model.safetensors.index.json".to_owned()];
    assert_eq!(place.names("shards_1"), expected);
    for name in &expected {
        let read = |ranks: usize| fs::read(place.path(&format!("shards_{ranks}/{name}"))).unwrap();
        assert_eq!(read(1), read(3), "{name}");
    }
    let text = fs::read_to_string(place.path("shards_1/model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&text).unwrap();
    let expected = json!({
        "metadata": {"total_size": 104},
        "weight_map": {
            "first.bias": file(2),
            "first.weight": file(1),
            "second.bias": file(2),
            "second.weight": file(3),
        },
    });
    assert_eq!(index, expected);
    for (name, values) in &state {
        let shard = index["weight_map"][name].as_str().unwrap();
        let loaded = load(&place.path("shards_1").join(shard));
        assert_eq!(bits(&loaded[name]), *values, "{name}");
        let here = index["weight_map"].as_object().unwrap().values();
        assert_eq!(loaded.len(), here.filter(|other| *other == shard).count());
    }
}

#[test]
fn files_get_the_names_of_the_library_asked_for_and_the_same_bytes() {
    let place = Place::new();
    saved_by_three_worlds(&place);
    let merge = |to: &str, library: &str| {
        place.printed(&[
            "merge-weights",
            "by_1",
            to,
            "--max_shard_size",
            "30",
            "--library",
            library,
        ]);
        place.names(to)
    };
    let (ours, theirs) = (merge("a", "transformers"), merge("b", "diffusers"));
    let renamed = Vec::from_iter(
        ours.iter()
            .map(|name| name.replacen("model", "diffusion_pytorch_model", 1)),
    );
    assert_eq!(theirs, renamed);
    for (ours, theirs) in ours
        .iter()
        .zip(&theirs)
        .filter(|(name, _)| name.ends_with(".safetensors"))
    {
        let read = |path: String| fs::read(place.path(&path)).unwrap();
        assert_eq!(read(format!("a/{ours}")), read(format!("b/{theirs}")));
    }
}

#[test]
fn values_are_rounded_to_the_dtype_asked_for() {
    let place = Place::saved();
    let whole = place.printed(&["merge-weights", "here", "f32", "--dtype", "f32"]);
    assert!(whole.contains("4 tensors"));
    let exact = load(&place.path("f32/model.safetensors"));
    for (word, dtype) in [("bf16", DType::BF16), ("float16", DType::F16)] {
        place.printed(&["merge-weights", "here", word, "--dtype", word]);
        for (name, rounded) in load(&place.path(word).join("model.safetensors")) {
            assert_eq!(rounded.dtype(), dtype);
            let expected = exact[&name].to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
            assert_eq!(bits(&rounded.to_dtype(DType::F32).unwrap()), bits(&expected), "{name}");
        }
    }
}

#[test]
fn values_that_f16_cannot_hold_are_refused_and_not_made_infinite() {
    let place = Place::new();
    let file = place.path("large.safetensors");
    let weight = Tensor::new(&[[1.0f32, -70_000.0]], &Device::Cpu).unwrap();
    candle_core::safetensors::save(&HashMap::from([("layer.weight", weight)]), &file).unwrap();
    let saved = launch_threads(2, |builder| -> Result<(), sconce_core::Error> {
        let acc = builder.build_with(|_| None)?;
        let weights = Weights::Files(WeightFiles::open(&[&file])?);
        linear_no_bias(2, 1, acc.var_builder(weights)?.pp("layer"))?;
        acc.prepare_optimizer(Box::new(AdamW::default()))?;
        acc.save_state(place.path("here")).map(drop)
    });
    saved.unwrap();
    let parts = ["\"layer.weight\": -70000 is too large for f16; take bf16 or f32"];
    place.assert_refused(&["merge-weights", "here", "out", "--dtype", "f16"], &parts);
    place.printed(&["merge-weights", "here", "out", "--dtype", "bf16"]);
}

#[test]
fn one_model_of_several_is_chosen_by_number() {
    let place = Place::new();
    let both = Run {
        has_second: true,
        ..Run::default()
    };
    both.save(&place.path("both"));
    let shapes = |folder: &str| {
        let loaded = load(&place.path(folder).join("model.safetensors"));
        let mut shapes = Vec::from_iter(loaded.into_iter().map(|(name, tensor)| (name, tensor.dims().to_vec())));
        shapes.sort();
        shapes
    };
    place.printed(&["merge-weights", "both", "first"]);
    assert_eq!(shapes("first").len(), 4);
    place.printed(&["merge-weights", "both", "second", "--model", "1"]);
    assert_eq!(
        shapes("second"),
        [("bias".to_owned(), vec![2]), ("weight".to_owned(), vec![2, 2])]
    );
    let parts = ["it has 2 models; model 2 is not there, counted from 0"];
    place.assert_refused(&["merge-weights", "both", "out", "--model", "2"], &parts);
}

#[test]
fn nothing_is_overwritten_and_an_empty_folder_is_filled() {
    let place = Place::saved();
    fs::create_dir(place.path("full")).unwrap();
    fs::write(place.path("full/notes.txt"), "mine").unwrap();
    place.assert_refused(
        &["merge-weights", "here", "full"],
        &["full: is not empty", "choose another name"],
    );
    assert_eq!(place.names("full"), ["notes.txt"]);
    place.assert_refused(
        &["merge-weights", "here", "full/notes.txt"],
        &["full/notes.txt: cannot become a model folder"],
    );
    fs::create_dir(place.path("empty")).unwrap();
    place.printed(&["merge-weights", "here", "empty"]);
    assert_eq!(place.names("empty"), ["model.safetensors"]);
    assert_eq!(
        place.names("."),
        ["empty", "full", "here", "latest"],
        "nothing unfinished is left"
    );
}

#[test]
fn flags_of_accelerate_that_do_not_fit_say_why() {
    let place = Place::saved();
    for (flag, said) in [
        ("--unsafe_serialization", "Sconce writes no pickles"),
        ("--remove_checkpoint_dir", "remove the folder yourself"),
        ("--max_shard_size=5PB", "expected a number of bytes such as 5GB"),
        ("--dtype=int8", "[possible values: f32, bf16, f16]"),
    ] {
        let (code, _, stderr) = place.outcome(&["merge-weights", "here", "out", flag]);
        assert!(code == 2 && stderr.contains(said), "{stderr}");
    }
    assert_eq!(place.names("."), ["here", "latest"]);
}
