//! Ranks among each other: places, order, parts, flags, objects.

use super::{CheckError, Checked, SelfTest, expect};
use crate::RandomState;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(super) fn places(test: &SelfTest<'_>) -> Checked {
    let world = test.acc.world();
    let places = test
        .acc
        .gather_objects(&[(world.rank, world.size, world.local_rank, world.local_size)])?;
    let ranks = Vec::from_iter(places.iter().map(|place| place.0));
    expect("ranks", &ranks, &Vec::from_iter(0..world.size))?;
    expect("worlds", &places.iter().all(|place| place.1 == world.size), &true)?;
    expect("places on hosts", &places.iter().all(|place| place.2 < place.3), &true)?;
    let settings = test.acc.settings();
    Ok(format!(
        "{} ranks, {} on this host, {:?}, {}, {:?}",
        world.size,
        world.local_size,
        test.acc.device().location(),
        settings.precision,
        settings.sharding
    ))
}

/// Compares times of this host: where ranks are on several, only that nobody is lost.
pub(super) fn order(test: &SelfTest<'_>) -> Checked {
    let now = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or(Duration::ZERO)
            .as_nanos() as u64
    };
    let span = || (now(), now());
    let main_first = test.acc.gather_objects(&[test.acc.main_process_first(span)?])?;
    let in_order = test.acc.gather_objects(&[test.acc.in_order(span)?])?;
    let on_one_host = test.acc.world().local_size == test.ranks();
    if on_one_host {
        let begins_after =
            |spans: &[(u64, u64)], first: usize| spans[first + 1..].iter().all(|span| span.0 >= spans[first].1);
        expect(
            "rank 0 is done before the others begin",
            &begins_after(&main_first, 0),
            &true,
        )?;
        let each = (0..test.ranks()).all(|rank| begins_after(&in_order, rank));
        expect("ranks run one after another", &each, &true)?;
    }
    Ok(format!("{} ranks", test.ranks()))
}

pub(super) fn split(test: &SelfTest<'_>) -> Checked {
    let (rank, ranks) = (test.rank(), test.ranks());
    let items = Vec::from_iter(0..17u32);
    let own = test.acc.split_between_processes(&items)?;
    let all = test.acc.gather_objects(&own)?;
    expect("a list of 17", &all, &items)?;
    let lengths = test.acc.gather_objects(&[own.len()])?;
    let (least, most) = (lengths.iter().min().copied(), lengths.iter().max().copied());
    let is_even = most.zip(least).is_some_and(|(most, least)| most - least <= 1);
    expect("parts differ by one item at most", &is_even, &true)?;

    let nested = BTreeMap::from([
        ("a", (items.clone(), items.clone())),
        ("b", (items.clone(), items.clone())),
    ]);
    let part = test.acc.split_between_processes(&nested)?;
    let parts = Vec::from_iter(part.values().flat_map(|(first, second)| [first, second]));
    expect("parts of nested lists", &parts.iter().all(|part| **part == own), &true)?;

    let rows = ranks + 1;
    let tensor = Tensor::arange(0f32, (rows * 2) as f32, &Device::Cpu)?.reshape((rows, 2))?;
    let part = test.acc.split_between_processes_padded(&tensor)?;
    let longest = rows.div_ceil(ranks);
    expect("rows of a padded part", &part.dim(0)?, &longest)?;
    let first = part.to_dtype(DType::F32)?.to_vec2::<f32>()?.into_iter().next();
    let expected = (rank == 0).then(|| vec![0.0, 1.0]);
    expect("first row of rank 0", &first.filter(|_| rank == 0), &expected)?;
    Ok(format!("17 items in parts of {lengths:?}"))
}

pub(super) fn trigger(test: &SelfTest<'_>) -> Checked {
    for raised_by in 0..test.ranks() {
        if test.rank() == raised_by {
            test.acc.set_trigger();
        }
        let seen = [test.acc.check_trigger()?, test.acc.check_trigger()?];
        expect(&format!("a flag of rank {raised_by}"), &seen, &[true, false])?;
    }
    Ok(format!("raised by each of {} ranks", test.ranks()))
}

pub(super) fn random_state(test: &SelfTest<'_>) -> Checked {
    let draw = || format!("{:?}", RandomState::draw_key());
    test.acc.synchronize_random_state()?;
    let drawn = test.acc.gather_objects(&[draw()])?;
    expect("keys that ranks draw", &drawn.iter().all(|key| *key == drawn[0]), &true)?;
    let seed = test.acc.seed();
    test.acc.set_seed(seed);
    let first = draw();
    test.acc.set_seed(seed);
    expect("the key after the seed is set again", &draw(), &first)?;
    Ok("keys are equal".into())
}

pub(super) fn objects(test: &SelfTest<'_>) -> Result<String, CheckError> {
    let own = (test.rank(), format!("rank {}", test.rank()), vec![0.5; test.rank()]);
    let all = test.acc.gather_objects(std::slice::from_ref(&own))?;
    let expected = (0..test.ranks()).map(|rank| (rank, format!("rank {rank}"), vec![0.5; rank]));
    let expected = Vec::from_iter(expected);
    expect("gathered objects", &all, &expected)?;
    for (from, sent) in expected.iter().enumerate() {
        let told = test.acc.broadcast_object(&own, from)?;
        expect("a broadcast object", &told, sent)?;
    }
    Ok(format!("{} objects", all.len()))
}
