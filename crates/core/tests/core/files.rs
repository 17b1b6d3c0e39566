//! Reading files: what they hold, and errors that name file and place.

use super::{accelerator, on_ranks};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::single;
use sconce_core::data::{JsonLines, SafetensorsRows, TextLines};
use sconce_core::{DataLoader, Dataset as _, IterableDataset as _};
use std::collections::HashMap;
use std::path::PathBuf;

fn write(folder: &tempfile::TempDir, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn lines_of_several_files_are_read_in_order_in_every_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder, "a.txt", "one\r\n\nthree");
    let second = write(&folder, "b.txt", "four\n");
    let lines = TextLines::open([&first, &second]).unwrap();
    assert_eq!(lines.read_all().unwrap(), ["one", "", "three", "four"]);
    for batches in on_ranks(2, |communicator| {
        let mut loader = accelerator(communicator)
            .prepare_loader(DataLoader::stream(lines.clone(), 1))
            .unwrap();
        [(); 2].map(|()| {
            (&mut loader)
                .into_iter()
                .map(|batch| batch.unwrap().concat())
                .collect::<Vec<_>>()
        })
    })
    .into_iter()
    .enumerate()
    {
        let (rank, epochs) = batches;
        let expected = [["one", "three"], ["", "four"]][rank];
        assert_eq!(epochs[0], expected);
        assert_eq!(epochs[1], expected);
    }
}

#[test]
fn json_lines_become_samples_and_empty_lines_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "a.jsonl", "[1.5, 2]\n\n  \n[2.5, 3]\n");
    let lines = JsonLines::<(f32, i64)>::open([path]).unwrap();
    assert_eq!(lines.read_all().unwrap(), [(1.5, 2), (2.5, 3)]);
    let acc = accelerator(single());
    let mut loader = acc
        .prepare_loader(DataLoader::new(lines.read_all().unwrap(), 2).shuffle(true))
        .unwrap();
    let (x, y) = (&mut loader).into_iter().next().unwrap().unwrap();
    assert_eq!((x.dims(), y.dims()), (&[2][..], &[2][..]));
}

#[test]
fn a_line_that_is_no_text_no_json_or_another_value_is_an_error_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&[u8], &str); 6] = [
        (b"1\n{\n", "line 2: invalid type: map"),
        (b"1\n\n\"text\"\n", "line 3: invalid type: string"),
        (b"1\n1\xff\n", "line 2: no UTF-8 from byte 1 on"),
        (b"1\n1 2\n", "line 2: trailing characters at column 3"),
        (b"1\n-1\n", "line 2: invalid value"),
        (b"1\n\0\0\n", "line 2: expected value"),
    ];
    for (number, (bytes, words)) in cases.into_iter().enumerate() {
        let path = write(&folder, &format!("{number}.jsonl"), bytes);
        let lines = JsonLines::<u32>::open([&path]).unwrap();
        let samples: Vec<_> = lines.samples(0).unwrap().collect();
        assert_eq!((samples.len(), *samples[0].as_ref().unwrap()), (2, 1));
        let text = samples[1].as_ref().unwrap_err().to_string();
        assert!(
            text.contains(words) && text.contains(&path.display().to_string()),
            "{text}"
        );
        assert_eq!(lines.read_all().unwrap_err().to_string(), text);
    }
    let nested = "[".repeat(100_000);
    let path = write(&folder, "deep.jsonl", nested);
    let text = JsonLines::<serde_json::Value>::open([path])
        .unwrap()
        .read_all()
        .unwrap_err()
        .to_string();
    assert!(text.contains("line 1: recursion limit"), "{text}");
}

#[test]
fn a_file_that_is_not_there_or_has_no_line_ends_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("none.txt"), folder.path().to_path_buf()] {
        let text = TextLines::open([&path]).unwrap_err().to_string();
        assert!(text.contains(&path.display().to_string()), "{text}");
    }
    let path = folder.path().join("endless.txt");
    // A hole: it takes no room.
    std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    let outcomes: Vec<_> = TextLines::open([&path]).unwrap().samples(0).unwrap().collect();
    assert_eq!(outcomes.len(), 1);
    let text = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(text.contains("endless.txt, line 1: longer than"), "{text}");
}

#[test]
fn rows_of_a_safetensors_file_are_those_of_its_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.safetensors");
    let tokens = Tensor::arange(0i64, 24, &Device::Cpu)
        .unwrap()
        .reshape((2, 3, 4))
        .unwrap();
    let weights = tokens
        .narrow(2, 0, 1)
        .unwrap()
        .to_dtype(DType::BF16)
        .unwrap()
        .contiguous()
        .unwrap();
    let file = HashMap::from([("tokens", tokens), ("weights", weights)]);
    candle_core::safetensors::save(&file, &path).unwrap();
    let rows = SafetensorsRows::open(&path, &["tokens", "weights"], 2).unwrap();
    assert_eq!(
        (rows.len(), rows.row_shapes().collect::<Vec<_>>()),
        (6, vec![&[4][..], &[1][..]])
    );
    let batch = rows.batch(&[5, 0], &Device::Cpu).unwrap();
    assert_eq!(batch[0].to_vec2::<i64>().unwrap(), [[20, 21, 22, 23], [0, 1, 2, 3]]);
    assert_eq!(
        batch[1].to_vec2::<half::bf16>().unwrap().concat().map_to_f32(),
        [20.0, 0.0]
    );
    assert!(
        rows.batch(&[6], &Device::Cpu)
            .unwrap_err()
            .to_string()
            .contains("no row 6")
    );
    let whole = SafetensorsRows::open(&path, &["tokens"], 1).unwrap();
    assert_eq!(whole.batch(&[1], &Device::Cpu).unwrap()[0].dims(), [1, 3, 4]);
}

/// Widens numbers, to compare them.
trait MapToF32 {
    fn map_to_f32(self) -> Vec<f32>;
}

impl MapToF32 for Vec<half::bf16> {
    fn map_to_f32(self) -> Vec<f32> {
        self.into_iter().map(f32::from).collect()
    }
}

#[test]
fn a_safetensors_file_that_is_cut_off_or_has_other_tensors_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.safetensors");
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::I64, &Device::Cpu).unwrap();
    let file = HashMap::from([
        ("tokens", zeros(&[4, 3])),
        ("labels", zeros(&[5, 3])),
        ("scalar", zeros(&[])),
    ]);
    candle_core::safetensors::save(&file, &path).unwrap();
    let refusal = |path: &PathBuf, names: &[&str]| {
        let text = SafetensorsRows::open(path, names, 1).unwrap_err().to_string();
        assert!(text.contains(&path.display().to_string()), "{text}");
        text
    };
    assert!(refusal(&path, &["tokens", "labels"]).contains("\"labels\" has shape [5, 3]"));
    assert!(refusal(&path, &["token"]).contains("it has labels, scalar, tokens"));
    assert!(refusal(&path, &["scalar"]).contains("at least 1 dimension"));
    assert!(refusal(&path, &[]).contains("at least one name"));
    let bytes = std::fs::read(&path).unwrap();
    for (number, length) in [0, 7, 20, bytes.len() - 1].into_iter().enumerate() {
        refusal(&write(&folder, &format!("cut{number}"), &bytes[..length]), &["tokens"]);
    }
    refusal(&write(&folder, "noise", [0xffu8; 64]), &["tokens"]);
}
