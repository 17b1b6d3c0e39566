//! Chat templates against what transformers makes of them, and what is said of templates that do not work.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use sconce_examples::text::{ChatTemplate, ExampleEncoder, Message, PromptFormat, Sample, SpecialTokens, TextEncoder};
use serde_json::{Value, json};

fn tokens() -> BTreeMap<String, String> {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    tokens.map(|(name, text)| (name.to_owned(), text.to_owned())).into()
}

fn parse(text: &str) -> Result<ChatTemplate> {
    ChatTemplate::parse(text, "model/chat_template.jinja".to_owned(), tokens())
}

fn messages(value: &Value) -> Vec<Message> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The recorded templates by name, each with its conversations.
fn recorded() -> BTreeMap<String, (String, Vec<Value>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat-templates.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let templates = file["templates"].as_object().unwrap().iter();
    let case = |(name, one): (&String, &Value)| {
        let cases = one["cases"].as_array().unwrap().clone();
        (name.clone(), (one["template"].as_str().unwrap().to_owned(), cases))
    };
    templates.map(case).collect()
}

#[test]
fn conversations_are_the_text_that_transformers_makes_of_them() {
    let recorded = recorded();
    assert_eq!(recorded.len(), 6);
    for (name, (template, cases)) in recorded {
        let template = parse(&template).unwrap();
        for case in cases {
            let messages = messages(&case["messages"]);
            assert_eq!(template.render(&messages, false).unwrap(), case["text"], "{name}");
            assert_eq!(template.render(&messages, true).unwrap(), case["prompt"], "{name}");
        }
    }
}

#[test]
fn token_ids_and_what_is_learnt_are_those_of_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-instruct");
    let encoder = TextEncoder::new(Some(&folder.join("tokenizer.json")), 512).unwrap();
    let special_tokens = SpecialTokens {
        by_name: tokens(),
        end: Some(2),
        padding: 0,
        stops: [2].into(),
    };
    let (template, cases) = &recorded()["marked"];
    let format = PromptFormat::Template(Box::new(parse(template).unwrap()));
    let encoder = ExampleEncoder {
        encoder: &encoder,
        format: &format,
        special_tokens: &special_tokens,
    };
    for case in cases {
        let example = encoder.encode(&Sample::Chat(messages(&case["messages"]))).unwrap();
        let ids: Vec<i64> = serde_json::from_value(case["ids"].clone()).unwrap();
        let mask: Vec<u8> = serde_json::from_value(case["mask"].clone()).unwrap();
        assert_eq!(example.tokens, ids);
        // The template marks what comes before the newline that ends a turn; here that newline is the turn's too.
        let newline = encoder.encoder.encode_text("\n", false).unwrap();
        for (position, (label, marked)) in example.labels.iter().zip(mask).enumerate() {
            let ends_turn = position > 0 && ids[position - 1] == 2 && newline == [ids[position]];
            if !ends_turn {
                assert_eq!(*label == ids[position], marked == 1, "position {position} of {case}");
            }
        }
    }
}

/// The parts of a text that are learnt.
fn learnt(format: &PromptFormat, sample: &Sample) -> Vec<String> {
    let marked = format.write(sample).unwrap();
    marked
        .learnt
        .iter()
        .map(|part| marked.text[part.clone()].to_owned())
        .collect()
}

#[test]
fn what_assistants_say_is_learnt_and_nothing_else() {
    let recorded = recorded();
    let chat = |name: &str| {
        let (template, cases) = &recorded[name];
        let format = PromptFormat::Template(Box::new(parse(template).unwrap()));
        learnt(&format, &Sample::Chat(messages(&cases[2]["messages"])))
    };
    let thought = "<think>\nHm.\n</think>\n\nRank 0.";
    assert_eq!(
        chat("chatml"),
        [format!("{thought}<|im_end|>\n"), "It sends them.<|im_end|>\n".into()]
    );
    assert_eq!(
        chat("llama2"),
        [format!(" {thought} </s>"), " It sends them. </s>".into()]
    );
    assert_eq!(
        chat("llama3"),
        [format!("{thought}<|eot_id|>"), "It sends them.<|eot_id|>".into()]
    );
    // Only the last turn keeps its thoughts.
    assert_eq!(
        chat("thinking"),
        [
            "Rank 0.<|im_end|>\n",
            "<think>\n\n</think>\n\nIt sends them.<|im_end|>\n"
        ]
    );
}

#[test]
fn without_a_template_questions_are_asked_as_alpaca_does() {
    let instruction = |input: &str| Sample::Instruction {
        instruction: "Add.".to_owned(),
        input: input.to_owned(),
        output: "3".to_owned(),
    };
    let marked = PromptFormat::Alpaca.write(&instruction("1 and 2")).unwrap();
    assert_eq!(
        marked.text,
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a \
         response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### \
         Response:\n3"
    );
    assert_eq!(learnt(&PromptFormat::Alpaca, &instruction("")), ["3"]);
    let chat = Sample::from_json(json!({"messages": [{"role": "assistant", "content": "x"}]})).unwrap();
    let error = PromptFormat::Alpaca.write(&chat).unwrap_err().to_string();
    assert!(error.contains("has no chat template"), "{error}");
}

#[test]
fn what_is_wrong_with_a_template_is_told_with_its_line() {
    let error = |text: &str| format!("{:#}", parse(text).err().unwrap());
    let broken = error("{{ bos_token }}\n{% for message in messages %}\n");
    assert!(
        broken.starts_with("model/chat_template.jinja, line 2: syntax error"),
        "{broken}"
    );
    let rendered = |text: &str| {
        let messages = messages(&json!([{"role": "user", "content": "x"}]));
        format!("{:#}", parse(text).unwrap().render(&messages, false).unwrap_err())
    };
    let refused = rendered("\n\n{{ raise_exception('No system message.') }}");
    assert!(
        refused.starts_with("model/chat_template.jinja, line 3: ") && refused.ends_with("No system message."),
        "{refused}"
    );
    let unknown = rendered("{{ open('/etc/passwd') }}");
    assert!(unknown.contains("line 1: unknown function"), "{unknown}");
    let endless = rendered("{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}");
    assert!(endless.contains("fuel"), "{endless}");
}

#[test]
fn the_template_of_a_file_of_its_own_comes_before_that_of_the_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let found = || ChatTemplate::find(folder.path(), tokens()).unwrap();
    assert!(found().is_none());
    let config = |template: Value| {
        let text = json!({"chat_template": template}).to_string();
        std::fs::write(folder.path().join("tokenizer_config.json"), text).unwrap();
    };
    config(Value::Null);
    assert!(found().is_none());
    config(json!("one"));
    assert_eq!(found().unwrap().render(&[], false).unwrap(), "one");
    config(json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]));
    assert_eq!(found().unwrap().render(&[], false).unwrap(), "two");
    std::fs::write(folder.path().join("chat_template.jinja"), "three").unwrap();
    assert_eq!(found().unwrap().render(&[], false).unwrap(), "three");
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    config(json!([{"name": "tool_use", "template": "tools"}]));
    let error = format!("{:#}", ChatTemplate::find(folder.path(), tokens()).err().unwrap());
    assert!(
        error.contains("tokenizer_config.json") && error.contains("\"default\""),
        "{error}"
    );
}
