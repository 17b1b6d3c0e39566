//! How two checkpoints differ.

use super::{Place, Run};
use serde_json::{Value, json};

#[test]
fn the_same_state_is_the_same_whatever_ranks_saved_it() {
    let place = Place::saved();
    let copy = Run {
        ranks: 3,
        steps: 0,
        from: Some(&place.path("here")),
        ..Run::default()
    };
    copy.save(&place.path("copy"));
    let printed = place.printed(&["checkpoint", "diff", "here", "copy"]);
    assert_eq!(printed, "the arrays are the same\n");
}

#[test]
fn values_that_changed_are_counted_with_the_largest_difference() {
    let place = Place::new();
    let run = |steps| Run {
        steps,
        ..Run::default()
    };
    let first = run(1).save(&place.path("a"));
    let second = run(2).save(&place.path("b"));
    let (code, stdout, stderr) = place.outcome(&["checkpoint", "diff", "--json", "a", "b"]);
    assert_eq!((code, stderr.as_str()), (1, ""));
    let told: Value = serde_json::from_str(&stdout).unwrap();
    let differences = told["differences"].as_array().unwrap();
    let of_values = differences.iter().filter(|difference| difference["array"] == "value");
    let of_values = Vec::from_iter(of_values);
    for ((name, before), (_, after)) in first.iter().zip(&second) {
        let told = of_values.iter().find(|difference| difference["name"] == **name);
        let changed = before.iter().zip(after).filter(|(before, after)| before != after);
        let distance = |(a, b): (&u32, &u32)| (f64::from(f32::from_bits(*a)) - f64::from(f32::from_bits(*b))).abs();
        let expected = json!({
            "model": 0,
            "name": name,
            "array": "value",
            "kind": "values",
            "changed": changed.clone().count(),
            "elements": before.len(),
            "max_abs_difference": changed.clone().map(distance).fold(0.0, f64::max),
        });
        // What is frozen is not told at all.
        assert_eq!(told.is_none(), name == "first.bias");
        assert!(told.is_none_or(|told| **told == expected), "{told:?} {expected}");
    }
    let (code, stdout, _) = place.outcome(&["checkpoint", "diff", "a", "b"]);
    assert_eq!(code, 1);
    let lines = Vec::from_iter(stdout.lines());
    assert_eq!(lines.len(), 1 + 9, "three arrays of three trained parameters\n{stdout}");
    let starts = [
        "MODEL  NAME           ARRAY       DIFFERENCE",
        "0      first.weight   exp_avg     15 of 15 values, by ",
    ];
    assert!(
        lines.iter().zip(starts).all(|(line, start)| line.starts_with(start)),
        "{stdout}"
    );
}

#[test]
fn shapes_and_what_only_one_has_are_told() {
    let place = Place::saved();
    let other = Run {
        hidden: 6,
        steps: 0,
        has_second: true,
        ..Run::default()
    };
    other.save(&place.path("other"));
    let (code, stdout, _) = place.outcome(&["checkpoint", "diff", "here", "other"]);
    assert_eq!(code, 1);
    let rows = Vec::from_iter(
        stdout
            .lines()
            .map(|line| Vec::from_iter(line.split_whitespace()).join(" ")),
    );
    let expected = [
        "MODEL NAME ARRAY DIFFERENCE",
        "0 first.bias - shape [5], in the second [6]",
        "0 first.weight - shape [5, 3], in the second [6, 3]",
        "0 second.bias exp_avg only in the first",
        "0 second.bias exp_avg_sq only in the first",
        "0 second.weight - shape [1, 5], in the second [1, 6]",
        "1 bias - only in the second",
        "1 weight - only in the second",
    ];
    let is_of_bias = |row: &&String| !row.starts_with("0 second.bias value");
    assert_eq!(
        Vec::from_iter(rows.iter().filter(is_of_bias)),
        Vec::from_iter(&expected)
    );
    let (_, stdout, _) = place.outcome(&["checkpoint", "diff", "other", "here"]);
    assert!(
        stdout.contains("only in the second") && stdout.contains("bias           -           only in the first"),
        "{stdout}"
    );
}
