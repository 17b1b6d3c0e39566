//! What `inspect` tells.

use super::{Place, Run};
use serde_json::{Value, json};
use std::fs;

#[test]
fn parameters_are_listed_with_what_is_saved_of_each() {
    let place = Place::saved();
    let expected = "\
checkpoint: here
saved by: 2 ranks
objects: none

model 0: 4 parameters, 26 elements, 272 bytes with optimizer state; adamw, at step 1
NAME           SHAPE   DTYPE  BYTES  ARRAYS                    FILES
first.bias     [5]     F32    20     value                     rank-00000.safetensors to rank-00001.safetensors (2)
first.weight   [5, 3]  F32    180    exp_avg,exp_avg_sq,value  rank-00000.safetensors to rank-00001.safetensors (2)
second.bias    [1]     F32    12     exp_avg,exp_avg_sq,value  rank-00000.safetensors
second.weight  [1, 5]  F32    60     exp_avg,exp_avg_sq,value  rank-00000.safetensors to rank-00001.safetensors (2)
";
    assert_eq!(place.printed(&["checkpoint", "inspect", "here"]), expected);
}

#[test]
fn json_has_every_array_and_the_settings() {
    let place = Place::saved();
    let printed = place.printed(&["checkpoint", "inspect", "--json", "here"]);
    let told: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&told["folder"], &told["world_size"]), (&json!("here"), &json!(2)));
    assert_eq!((&told["skipped"], &told["objects"]), (&json!([]), &json!({})));
    let model = &told["models"][0];
    assert_eq!((&model["rule"], &model["steps"]), (&json!("adamw"), &json!(1)));
    let files = json!(["rank-00000.safetensors", "rank-00001.safetensors"]);
    let array = |name: &str| json!({"name": name, "dtype": "F32", "bytes": 60, "files": files});
    let expected = json!({
        "name": "first.weight",
        "shape": [5, 3],
        "arrays": [array("exp_avg"), array("exp_avg_sq"), array("value")],
    });
    assert_eq!(model["parameters"][1], expected);
    assert!(told["settings"].is_object(), "{told}");
}

#[test]
fn a_folder_of_checkpoints_means_the_newest_whole_one_and_says_what_was_passed_over() {
    let place = Place::new();
    for (number, steps) in [(3, 1), (12, 2), (20, 3)] {
        let run = Run {
            steps,
            ..Run::default()
        };
        run.save(&place.path(&format!("all/checkpoint_{number}")));
    }
    fs::remove_file(place.path("all/checkpoint_20/rank-00001.safetensors")).unwrap();
    // A file of the user's own beside them is nobody's business.
    fs::write(place.path("all/notes.pt"), "mine").unwrap();
    for words in [
        &["checkpoint", "inspect", "all"][..],
        &["checkpoint", "verify", "all"],
        &["merge-weights", "all", "out"],
    ] {
        let (code, stdout, stderr) = place.outcome(words);
        assert_eq!(code, 0, "{stderr}");
        let expected =
            "note: passed over, checkpoint, all/checkpoint_20/index.json: rank-00001.safetensors: No such file";
        assert!(stderr.starts_with(expected) && stderr.lines().count() == 1, "{stderr}");
        assert!(
            words[0] == "merge-weights" || stdout.contains("all/checkpoint_12"),
            "{stdout}"
        );
    }
}

#[test]
fn names_cannot_steer_the_terminal() {
    let place = Place::saved();
    let index = place.path("here/index.json");
    let text = place.index_without_hash("here");
    fs::write(&index, text.replace("first.bias", "first\\u001b[2Jbias\\nx")).unwrap();
    for words in [["checkpoint", "inspect", "here"], ["checkpoint", "verify", "here"]] {
        let (_, stdout, stderr) = place.outcome(&words);
        assert!(
            !stdout.contains('\u{1b}') && !stderr.contains('\u{1b}'),
            "{stdout}{stderr}"
        );
    }
    let printed = place.printed(&["checkpoint", "inspect", "here"]);
    assert!(printed.contains("first\\u{1b}[2Jbias\\nx  "), "{printed}");
}
