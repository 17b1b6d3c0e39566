//! Training data as rows of tokens, from every kind of file, and what is said of files that do not fit.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use sconce_examples::text::TokenRows;
use tempfile::TempDir;

/// A tokenizer of whole words with a special token before each document, that would pad and cut if it were let.
const TOKENIZER: &str = r#"{
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "<unk>"},
    "added_tokens": [
        {"id": 0, "content": "<unk>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
         "special": true},
        {"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
         "special": true}],
    "normalizer": null,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "burn": 2, "candle": 3, "light": 4},
              "unk_token": "<unk>"}
}"#;

struct Files(TempDir);

impl Files {
    fn new() -> Result<Self> {
        Ok(Self(tempfile::tempdir()?))
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<PathBuf> {
        let path = self.0.path().join(name);
        fs::write(&path, content)?;
        Ok(path)
    }

    fn write_tensors(&self, name: &str, tensors: &[(&str, Tensor)]) -> Result<PathBuf> {
        let path = self.0.path().join(name);
        let tensors: HashMap<_, _> = tensors.iter().cloned().collect();
        candle_core::safetensors::save(&tensors, &path)?;
        Ok(path)
    }
}

fn error_of(path: &Path, tokenizer: Option<&Path>, vocab_size: usize, sequence_length: Option<usize>) -> String {
    let error = format!(
        "{:#}",
        TokenRows::read(path, tokenizer, vocab_size, sequence_length).unwrap_err()
    );
    assert!(
        error.starts_with(&path.display().to_string()),
        "names the file: {error}"
    );
    error
}

#[test]
fn plain_text_without_a_tokenizer_is_its_bytes_cut_into_rows() -> Result<()> {
    let files = Files::new()?;
    let path = files.write("text.txt", "abcd\u{e9}fgh")?;
    let rows = TokenRows::read(&path, None, 256, Some(4))?;
    assert_eq!((rows.rows, rows.sequence_length, rows.rows_per_step), (2, 4, None));
    assert_eq!(rows.row(0), [97, 98, 99, 100]);
    assert_eq!(
        rows.row(1),
        [0xc3, 0xa9, 102, 103],
        "the ninth byte does not fill a row"
    );
    assert_eq!(rows.row_labels(1), rows.row(1));
    assert_eq!(rows.tokens.len(), 8);
    Ok(())
}

#[test]
fn documents_of_json_lines_are_joined_in_order() -> Result<()> {
    let files = Files::new()?;
    let path = files.write(
        "text.jsonl",
        "{\"text\": \"ab\", \"id\": 1}\r\n\n{\"text\": \"c\\nd\"}\n",
    )?;
    let rows = TokenRows::read(&path, None, 256, Some(6))?;
    assert_eq!(rows.row(0), [97, 98, 10, 99, 10, 100]);
    Ok(())
}

#[test]
fn a_tokenizer_encodes_each_document_whole_with_its_special_tokens() -> Result<()> {
    let files = Files::new()?;
    let tokenizer = files.write("tokenizer.json", TOKENIZER)?;
    let path = files.write(
        "text.jsonl",
        "{\"text\": \"candle burn light burn\"}\n{\"text\": \"wax\"}\n",
    )?;
    let rows = TokenRows::read(&path, Some(&tokenizer), 5, Some(7))?;
    assert_eq!(rows.row(0), [1, 3, 2, 4, 2, 1, 0]);
    Ok(())
}

#[test]
fn a_bad_line_is_an_error_with_its_number() -> Result<()> {
    let files = Files::new()?;
    let good = "{\"text\": \"a\"}\n\n";
    for (line, reason) in [
        ("{\"text\": \"a\"", "EOF"),
        ("[1]", "no object"),
        ("{\"texts\": \"a\"}", "no `text`"),
        ("{\"text\": 7}", "`text` is 7, expected a string"),
    ] {
        let path = files.write("bad.jsonl", format!("{good}{line}\n"))?;
        let error = error_of(&path, None, 256, Some(2));
        assert!(error.contains("line 3") && error.contains(reason), "{error}");
    }
    Ok(())
}

#[test]
fn text_that_cannot_become_rows_is_an_error() -> Result<()> {
    let files = Files::new()?;
    let path = files.write("text.txt", "abc")?;
    assert!(error_of(&path, None, 256, Some(4)).contains("3 tokens, expected at least one row of 4"));
    assert!(error_of(&path, None, 256, None).contains("at least one row of 128"));
    assert!(error_of(&path, None, 256, Some(0)).contains("sequence length is 0"));
    let error = error_of(&path, None, 32000, Some(2));
    assert!(
        error.contains("no tokenizer.json") && error.contains("32000") && error.contains("256"),
        "{error}"
    );
    let tokenizer = files.write("tokenizer.json", "{}")?;
    assert!(error_of(&path, Some(&tokenizer), 256, Some(2)).contains("tokenizer.json: cannot be read"));
    let binary = files.write("binary.txt", [0xff, 0xfe, 0x00])?;
    assert!(error_of(&binary, None, 256, Some(2)).contains("UTF-8"));
    error_of(&files.0.path().join("missing.txt"), None, 256, Some(2));
    Ok(())
}

#[test]
fn a_token_outside_the_vocabulary_is_an_error_with_row_and_id() -> Result<()> {
    let files = Files::new()?;
    let tokenizer = files.write("tokenizer.json", TOKENIZER)?;
    let path = files.write("text.txt", "burn burn light burn")?;
    let error = error_of(&path, Some(&tokenizer), 4, Some(2));
    assert!(
        !error.contains("row 0") && error.contains("expected ids from 0 to 3"),
        "{error}"
    );

    let tokens = |ids: [[[i64; 2]; 2]; 1]| Tensor::new(&ids, &Device::Cpu);
    let fits = tokens([[[0, 1], [2, 3]]])?;
    for (tensors, reason) in [
        (
            vec![("tokens", tokens([[[0, 1], [4, 3]]])?)],
            "row 1 holds the token id 4, expected ids from 0 to 3",
        ),
        (
            vec![("tokens", tokens([[[0, -1], [2, 3]]])?)],
            "row 0 holds the token id -1",
        ),
        (
            vec![("tokens", tokens([[[-100, 1], [2, 3]]])?)],
            "row 0 holds the token id -100",
        ),
        (
            vec![("tokens", fits.clone()), ("labels", tokens([[[-100, 1], [2, 9]]])?)],
            "row 1 holds the label 9",
        ),
        (
            vec![("tokens", fits.clone()), ("labels", tokens([[[-100, -1], [2, 3]]])?)],
            "row 0 holds the label -1",
        ),
    ] {
        let path = files.write_tensors("tokens.safetensors", &tensors)?;
        let error = error_of(&path, None, 4, None);
        assert!(error.contains(reason), "{error}");
    }
    Ok(())
}

#[test]
fn a_file_of_tokens_is_taken_in_order_as_steps_times_batch_rows() -> Result<()> {
    let files = Files::new()?;
    let tokens = Tensor::arange(0i64, 24, &Device::Cpu)?.reshape((2, 3, 4))?;
    let labels = (&tokens + 1.0)?;
    let path = files.write_tensors("tokens.safetensors", &[("tokens", tokens), ("labels", labels)])?;
    let rows = TokenRows::read(&path, None, 32, Some(4))?;
    assert_eq!((rows.rows, rows.sequence_length, rows.rows_per_step), (6, 4, Some(3)));
    assert_eq!(rows.row(4), [16, 17, 18, 19]);
    assert_eq!(rows.row_labels(4), [17, 18, 19, 20]);
    assert!(error_of(&path, None, 32, Some(8)).contains("rows of 4 tokens, and a sequence length of 8"));
    Ok(())
}

#[test]
fn a_file_of_tokens_in_another_form_is_an_error() -> Result<()> {
    let files = Files::new()?;
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let good = zeros(&[1, 2, 3], DType::I64)?;
    for (tensors, reason) in [
        (vec![("ids", good.clone())], "holds a tensor `ids`"),
        (vec![("labels", good.clone())], "no tensor `tokens`"),
        (vec![("tokens", zeros(&[2, 3], DType::I64)?)], "`tokens` is I64 [2, 3]"),
        (
            vec![("tokens", zeros(&[1, 2, 3], DType::U32)?)],
            "`tokens` is U32 [1, 2, 3]",
        ),
        (vec![("tokens", zeros(&[0, 2, 3], DType::I64)?)], "[0, 2, 3]"),
        (
            vec![("tokens", good.clone()), ("labels", zeros(&[1, 3, 2], DType::I64)?)],
            "`labels` has the shape [1, 3, 2], expected that of `tokens`, [1, 2, 3]",
        ),
    ] {
        let path = files.write_tensors("tokens.safetensors", &tensors)?;
        let error = error_of(&path, None, 256, None);
        assert!(error.contains(reason), "{error}");
    }
    Ok(())
}

#[test]
fn a_damaged_file_of_tokens_is_an_error_and_never_a_panic() -> Result<()> {
    let files = Files::new()?;
    let good = Tensor::zeros((1, 2, 3), DType::I64, &Device::Cpu)?;
    let whole = fs::read(files.write_tensors("tokens.safetensors", &[("tokens", good)])?)?;
    for length in [0, 4, 8, 20, whole.len() - 1] {
        let path = files.write("cut.safetensors", &whole[..length])?;
        assert!(error_of(&path, None, 256, None).contains("is not a complete safetensors file"));
    }
    let path = files.write("huge.safetensors", [&u64::MAX.to_le_bytes(), &whole[8..]].concat())?;
    assert!(error_of(&path, None, 256, None).contains("is not a complete safetensors file"));
    Ok(())
}
