//! Which parts become units, and which are recomputed.

use sconce_fsdp::{Error, FullyShardedOptions, IgnoredModules, WrapPolicy};
use sconce_zero::{UnitCandidate, UnitPolicy};

/// Parts of a small decoder: name, class, elements.
const PARTS: [(&str, &str, usize); 5] = [
    ("model.embed_tokens", "Embedding", 900),
    ("model.layers.0", "DecoderLayer", 500),
    ("model.layers.1", "DecoderLayer", 500),
    ("adapter", "", 20),
    ("lm_head", "Linear", 900),
];

fn chosen(policy: &UnitPolicy) -> Vec<&'static str> {
    let is_chosen = |part: &&(&'static str, &'static str, usize)| {
        let (name, class, elements) = **part;
        policy.chooses(&UnitCandidate { name, class, elements })
    };
    PARTS.iter().filter(is_chosen).map(|part| part.0).collect()
}

#[test]
fn policies_choose_by_class_by_size_by_rule_or_not_at_all() {
    let layers = ["model.layers.0", "model.layers.1"];
    let all = PARTS.map(|part| part.0);
    let rows: [(WrapPolicy, &[&str]); 7] = [
        (WrapPolicy::transformer_based(["DecoderLayer"]), &layers),
        (
            WrapPolicy::transformer_based(["Linear", "Embedding"]),
            &[all[0], all[4]],
        ),
        (WrapPolicy::transformer_based([]), &all),
        (
            WrapPolicy::SizeBased { min_num_params: 500 },
            &[all[0], all[1], all[2], all[4]],
        ),
        (WrapPolicy::SizeBased { min_num_params: 501 }, &[all[0], all[4]]),
        (WrapPolicy::NoWrap, &[]),
        (WrapPolicy::matching(|part| part.name.ends_with('1')), &[all[2]]),
    ];
    for (policy, expected) in rows {
        assert_eq!(chosen(&policy.unit_policy(None)), expected, "{policy:?}");
    }
}

#[test]
fn what_is_ignored_is_never_a_unit() {
    let ignored = IgnoredModules::new(r"model\.layers\.0|lm_.*").unwrap();
    let policy = WrapPolicy::transformer_based([]).unit_policy(Some(&ignored));
    assert_eq!(chosen(&policy), ["model.embed_tokens", "model.layers.1", "adapter"]);
}

#[test]
fn activations_are_checkpointed_by_unit_or_by_part_where_there_are_no_units() {
    let recomputed = |wrap, activation_checkpointing| {
        let options = FullyShardedOptions {
            auto_wrap_policy: Some(wrap),
            activation_checkpointing: Some(activation_checkpointing),
            ..FullyShardedOptions::default()
        };
        chosen(&options.resolve().unwrap().recomputed())
    };
    let layers = || WrapPolicy::transformer_based(["DecoderLayer"]);
    assert_eq!(recomputed(layers(), true), ["model.layers.0", "model.layers.1"]);
    assert_eq!(recomputed(WrapPolicy::NoWrap, true), PARTS.map(|part| part.0));
    assert_eq!(recomputed(layers(), false), [""; 0]);
}

#[test]
fn a_class_that_matches_nothing_is_an_error_that_lists_those_that_exist() {
    let known = ["Linear", "", "DecoderLayer", "DecoderLayer"].map(str::to_owned);
    let policy = WrapPolicy::transformer_based(["DecoderLayer", "BertLayer", "decoderlayer"]);
    let error = policy.check_classes(&known).unwrap_err();
    assert!(matches!(&error, Error::UnknownClasses { missing, .. } if *missing == ["BertLayer", "decoderlayer"]));
    assert_eq!(
        error.to_string(),
        "transformer_layer_cls_to_wrap: no part of the model has the class BertLayer or decoderlayer; it declares parts of \
         DecoderLayer, Linear"
    );
    let error = policy.check_classes(&[]).unwrap_err().to_string();
    assert!(error.contains("it declares no part with a class"), "{error}");
    for policy in [
        WrapPolicy::transformer_based(["Linear"]),
        WrapPolicy::transformer_based([]),
        WrapPolicy::NoWrap,
        WrapPolicy::SizeBased { min_num_params: 1 },
    ] {
        policy.check_classes(&known).unwrap();
    }
}
