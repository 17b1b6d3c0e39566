//! The spellings of Accelerate's flags and variables (`tests/fsdp/test_fsdp.py` of huggingface/accelerate).

use sconce_fsdp::{
    AutoWrapPolicy, BackwardPrefetch, Error, FsdpStrategy, FsdpVersion, IgnoredModules, Named, ReshardAfterForward,
    StateDictType,
};
use std::fmt::Debug;

/// Every value is found by its name in either case, and by its number from 1 exactly where it has one.
fn assert_named<T: Named + Debug>(names: &[&str], by_number: bool) {
    assert_eq!(Vec::from_iter(T::NAMES.iter().map(|(name, _)| *name)), names);
    for (index, (name, value)) in T::NAMES.iter().enumerate() {
        assert_eq!(T::from_name(name), Some(*value));
        assert_eq!(T::from_name(&name.to_lowercase()), Some(*value));
        assert_eq!(value.name(), *name);
        let number = (index + 1).to_string();
        assert_eq!(T::from_name(&number), by_number.then_some(*value), "{number}");
        assert!(T::expected().contains(name), "{}", T::expected());
    }
    for unknown in ["", "0", "9", "-1", "FULL", "FULL_SHARD "] {
        assert_eq!(T::from_name(unknown), None, "{unknown:?}");
    }
}

#[test]
fn values_have_accelerates_names_and_those_of_torchs_enumerations_numbers_from_1() {
    let strategies = [
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "HYBRID_SHARD_ZERO2",
    ];
    assert_named::<FsdpStrategy>(&strategies, true);
    assert_named::<BackwardPrefetch>(&["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"], false);
    assert_named::<AutoWrapPolicy>(&["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"], false);
    let types = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"];
    assert_named::<StateDictType>(&types, true);
    assert_eq!(FsdpVersion::from_name("1"), Some(FsdpVersion::One));
    assert_eq!(FsdpVersion::from_name("2"), Some(FsdpVersion::Two));
    assert_eq!(FsdpVersion::expected(), "expected 1 or 2");
    assert_eq!(
        BackwardPrefetch::expected(),
        "expected BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"
    );
}

#[test]
fn resharding_is_a_yes_or_no_or_a_strategy() {
    let named = ReshardAfterForward::from_name;
    assert_eq!(named("True"), Some(ReshardAfterForward::Bool(true)));
    assert_eq!(named("false"), Some(ReshardAfterForward::Bool(false)));
    let strategy = FsdpStrategy::HybridShard;
    assert_eq!(named("hybrid_shard"), Some(ReshardAfterForward::Strategy(strategy)));
    assert_eq!(named("maybe"), None);
    assert_eq!(ReshardAfterForward::Strategy(strategy).to_string(), "HYBRID_SHARD");
}

#[test]
fn ignored_modules_are_matched_by_their_whole_names_and_hold_what_is_inside() {
    let rows = [
        (r"layers\.0", "layers.0", true),
        (r"layers\.0", "layers.0.mlp.up.weight", true),
        (r"layers\.0", "layers.01.weight", false),
        (r"layers\.0", "model.layers.0.weight", false),
        (r"a|b", "b.weight", true),
        (r"a|b", "ab.weight", false),
        (r".*router", "layers.3.router.weight", true),
        // The model itself has the empty name: everything lies in it.
        (r".*", "anything", true),
        (r"", "anything", true),
    ];
    for (pattern, name, expected) in rows {
        let ignored = IgnoredModules::new(pattern).unwrap();
        assert_eq!(ignored.contains(name), expected, "{pattern} {name}");
    }
    for pattern in ["layers.[", "a)(b", "*"] {
        let error = IgnoredModules::new(pattern).unwrap_err();
        assert!(matches!(&error, Error::Setting { setting: "ignored_modules", value, .. } if value == pattern));
        assert!(error.to_string().contains("expected a regular expression"), "{error}");
    }
}
