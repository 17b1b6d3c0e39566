//! Questions and answers as rows: what is learnt, what fills up, what is packed, what is held out.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::Device;
use sconce_core::Dataset as _;
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::text::{
    ChatTemplate, DataOptions, Divided, Example, ExampleEncoder, PromptFormat, Sample, SpecialTokens, TextEncoder,
    TrainingData,
};
use serde_json::{Value, json};

/// A model that reads bytes and has a template of its own.
struct Texts {
    encoder: TextEncoder,
    special_tokens: SpecialTokens,
    format: PromptFormat,
}

impl Texts {
    fn new() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-llama");
        let folder = ModelFolder::open(&folder).unwrap();
        let encoder = TextEncoder::new(None, 256).unwrap();
        let special_tokens = SpecialTokens::read(&folder, &encoder).unwrap();
        let template = "{% for message in messages %}{{ message.role[0] + message.content }}.{% endfor %}\
                        {% if add_generation_prompt %}a{% endif %}";
        let template = ChatTemplate::parse(template, "template".to_owned(), Default::default()).unwrap();
        Self {
            encoder,
            special_tokens,
            format: PromptFormat::Template(Box::new(template)),
        }
    }

    fn encoder(&self) -> ExampleEncoder<'_> {
        ExampleEncoder {
            encoder: &self.encoder,
            format: &self.format,
            special_tokens: &self.special_tokens,
        }
    }

    fn read(&self, path: &Path, sequence_length: usize, packing: bool, held_out: f64) -> Result<Divided> {
        let options = DataOptions {
            examples: Some(self.encoder()),
            vocab_size: 256,
            sequence_length: Some(sequence_length),
            packing,
            held_out,
        };
        TrainingData::read(path, &options)
    }
}

fn file(folder: &Path, lines: &[Value]) -> PathBuf {
    let path = folder.join("data.jsonl");
    let lines = Vec::from_iter(lines.iter().map(|line| format!("{line}\n")));
    std::fs::write(&path, lines.concat()).unwrap();
    path
}

fn pair(question: &str, answer: &str) -> Value {
    json!({"instruction": question, "output": answer})
}

/// The tokens as text; what is not learnt is told apart.
fn shown(example: &Example) -> (String, String) {
    let text = |ids: Vec<i64>| String::from_utf8(ids.into_iter().map(|id| id as u8).collect()).unwrap();
    let learnt = example
        .labels
        .iter()
        .map(|label| if *label == -100 { i64::from(b'_') } else { *label });
    (text(example.tokens.clone()), text(learnt.collect()))
}

#[test]
fn the_three_forms_of_a_question_are_one_example() {
    let texts = Texts::new();
    for line in [
        json!({"instruction": "hi", "input": "", "output": "yes"}),
        json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}),
        json!({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}),
    ] {
        let example = texts.encoder().encode(&Sample::from_json(line).unwrap()).unwrap();
        assert_eq!(shown(&example), ("uhi.ayes.".into(), "_____yes.".into()));
    }
    // Plain text is learnt but for its first token, and ends with the token that ends texts.
    let example = texts.encoder().encode(&Sample::Text("abc".into())).unwrap();
    assert_eq!(shown(&example), ("abc\0".into(), "_bc\0".into()));
}

#[test]
fn a_line_that_is_no_sample_is_told_with_its_number() {
    let (texts, folder) = (Texts::new(), tempfile::tempdir().unwrap());
    for (line, reason) in [
        (json!({"instruction": "hi"}), "no `output`"),
        (
            json!({"instruction": 1, "output": "x"}),
            "`instruction` is 1, expected a string",
        ),
        (json!({"messages": {}}), "expected a list of messages"),
        (json!({"messages": [{"content": "hi"}]}), "message 0 has no `role`"),
        (
            json!({"messages": [{"role": "user", "content": "hi"}]}),
            "no message is an assistant's",
        ),
        (json!({"conversations": [{"from": "gpt"}]}), "`value` is missing"),
        (json!({"question": "hi"}), "no `text`"),
    ] {
        let path = file(folder.path(), &[pair("a", "b"), line]);
        let error = format!("{:#}", texts.read(&path, 64, false, 0.0).unwrap_err());
        assert!(error.contains("line 2") && error.contains(reason), "{error}");
    }
    let path = file(folder.path(), &[pair("a", "b"), json!({"text": "c"})]);
    let error = texts.read(&path, 64, false, 0.0).unwrap_err().to_string();
    assert!(error.contains("1 of 2 samples are plain text"), "{error}");
}

/// Written by pyarrow: `{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}` and the
/// same with "é?" and "no".
const PARQUET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/chats.parquet");

#[cfg(feature = "parquet")]
#[test]
fn conversations_in_parquet_are_those_of_json_lines() -> Result<()> {
    let texts = Texts::new();
    let TrainingData::Examples(rows) = texts.read(Path::new(PARQUET), 64, false, 0.0)?.training else {
        panic!("these are examples")
    };
    let shown = Vec::from_iter(rows.examples().iter().map(shown));
    let expected = [("uhi.ayes.", "_____yes."), ("ué?.ano.", "______no.")];
    assert_eq!(
        shown,
        expected.map(|(text, learnt)| (text.to_owned(), learnt.to_owned()))
    );
    Ok(())
}

#[cfg(not(feature = "parquet"))]
#[test]
fn a_program_without_parquet_says_how_to_build_one_with_it() {
    let error = format!(
        "{:#}",
        Texts::new().read(Path::new(PARQUET), 64, false, 0.0).unwrap_err()
    );
    assert!(
        error.contains("chats.parquet") && error.contains("--features parquet"),
        "{error}"
    );
}

#[test]
fn rows_are_filled_up_to_the_longest_of_their_batch() -> Result<()> {
    let (texts, folder) = (Texts::new(), tempfile::tempdir()?);
    // 6, 8 and 14 tokens; of the last nothing is learnt within 10.
    let path = file(
        folder.path(),
        &[pair("a", "b"), pair("abc", "d"), pair("question?", "e")],
    );
    let data = texts.read(&path, 10, false, 0.0)?.training;
    assert_eq!(data.len(), 2);
    assert!(data.notice().unwrap().contains("1 samples have nothing to learn"));
    let batch = data.batch(&[1, 0], &Device::Cpu).unwrap();
    assert_eq!(batch.tokens.dims(), [2, 8]);
    assert_eq!((batch.tokens_read, batch.document_starts), (14, None));
    let last = batch.labels.to_vec2::<i64>()?.remove(1);
    let b = i64::from(b'b');
    assert_eq!(last, [-100, -100, -100, -100, b, i64::from(b'.'), -100, -100]);
    assert_eq!(batch.tokens.to_vec2::<i64>()?[1][6..], [0, 0]);
    Ok(())
}

#[test]
fn packed_rows_hold_whole_examples_that_know_where_they_begin() -> Result<()> {
    let (texts, folder) = (Texts::new(), tempfile::tempdir()?);
    // 6, 10, 6 and 8 tokens in rows of 16: the first takes those that fit.
    let lines = [pair("a", "b"), pair("abcd", "ef"), pair("c", "d"), pair("e", "fgh")];
    let path = file(folder.path(), &lines);
    let data = texts.read(&path, 16, true, 0.0)?.training;
    assert_eq!(data.len(), 2);
    let batch = data.batch(&[0, 1], &Device::Cpu).unwrap();
    assert_eq!((batch.tokens.dims(), batch.tokens_read), (&[2, 16][..], 16 + 14));
    let text = |row: usize| -> Result<String> {
        let ids = batch.tokens.to_vec2::<i64>()?.swap_remove(row);
        Ok(String::from_utf8(ids.into_iter().map(|id| id as u8).collect())?)
    };
    assert_eq!([text(0)?, text(1)?], ["ua.ab.uabcd.aef.", "uc.ad.ue.afgh.\0\0"]);
    let starts = batch.document_starts.unwrap();
    assert_eq!(starts[..16], [[0; 6].as_slice(), &[6; 10]].concat());
    assert_eq!(starts[16..], [[0; 6].as_slice(), &[6; 8], &[14; 2]].concat());
    Ok(())
}

#[test]
fn every_tenth_is_held_out_and_nothing_is_on_both_sides() -> Result<()> {
    let (texts, folder) = (Texts::new(), tempfile::tempdir()?);
    let lines = Vec::from_iter((0..25).map(|number| pair(&format!("{number:02}"), "x")));
    let divided = texts.read(&file(folder.path(), &lines), 64, false, 0.1)?;
    let numbers = |data: &TrainingData| {
        let TrainingData::Examples(rows) = data else {
            panic!("these are examples")
        };
        let number = |example: &Example| shown(example).0[1..3].parse::<u32>().unwrap();
        Vec::from_iter(rows.examples().iter().map(number))
    };
    let held_out = numbers(&divided.held_out.unwrap());
    assert_eq!(held_out, [9, 19]);
    let training = numbers(&divided.training);
    assert_eq!(
        training,
        Vec::from_iter((0..25).filter(|number| !held_out.contains(number)))
    );
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "0123456789".repeat(4))?;
    let divided = texts.read(&text, 4, false, 0.5)?;
    assert_eq!((divided.training.len(), divided.held_out.unwrap().len()), (5, 5));
    let error = format!("{:#}", texts.read(&text, 20, false, 0.1).unwrap_err());
    assert!(error.contains("2 rows to train on and 0 to evaluate on"), "{error}");
    Ok(())
}

#[test]
fn the_shipped_instructions_fit_the_shipped_model() -> Result<()> {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    let folder = ModelFolder::open(&assets.join("tiny-instruct"))?;
    let encoder = TextEncoder::new(folder.tokenizer.as_deref(), 512)?;
    let special_tokens = SpecialTokens::read(&folder, &encoder)?;
    assert_eq!((special_tokens.end, special_tokens.padding), (Some(2), 0));
    let template = ChatTemplate::find(&folder.directory, special_tokens.by_name.clone())?.unwrap();
    let texts = Texts {
        encoder,
        special_tokens,
        format: PromptFormat::Template(Box::new(template)),
    };
    for (name, least) in [("sconce.jsonl", 100), ("chats.jsonl", 30)] {
        let options = DataOptions {
            examples: Some(texts.encoder()),
            vocab_size: 512,
            sequence_length: None,
            packing: false,
            held_out: 0.0,
        };
        let data = TrainingData::read(&assets.join("instructions").join(name), &options)?.training;
        assert!(data.len() >= least && data.notice().is_none(), "{name}");
    }
    // An answer ends with the token that ends texts, and that is learnt.
    let sample = Sample::from_json(pair("Who?", "I."))?;
    let example = texts.encoder().encode(&sample)?;
    let end = example.tokens.iter().rposition(|id| *id == 2).unwrap();
    assert_eq!(example.labels[end], 2);
    let learnt = Vec::from_iter(example.labels.iter().copied().filter(|label| *label != -100));
    assert_eq!(texts.encoder.decode(&learnt)?, "I.\n");
    Ok(())
}
