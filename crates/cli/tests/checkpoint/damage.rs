//! Damaged and hostile checkpoints: every command says what is wrong and where, with exit code 1.

use super::{Place, values_start};
use std::fs;

#[test]
fn a_whole_checkpoint_is_verified() {
    let place = Place::saved();
    let printed = place.printed(&["checkpoint", "verify", "here"]);
    assert_eq!(printed, "here: whole, 272 bytes of arrays are as they were written\n");
}

#[test]
fn every_flipped_byte_of_the_values_is_found_with_its_file_and_tensor() {
    let place = Place::saved();
    let path = place.path("here/rank-00001.safetensors");
    let whole = fs::read(&path).unwrap();
    let start = values_start(&whole);
    let header: serde_json::Value = serde_json::from_slice(&whole[8..start]).unwrap();
    for place_in_data in [0, (whole.len() - start) / 2, whole.len() - start - 1] {
        let mut flipped = whole.clone();
        flipped[start + place_in_data] ^= 0x10;
        fs::write(&path, &flipped).unwrap();
        let holds = |info: &serde_json::Value| {
            let offsets = [0, 1].map(|end| info["data_offsets"][end].as_u64().unwrap() as usize);
            (offsets[0]..offsets[1]).contains(&place_in_data)
        };
        let tensors = header.as_object().unwrap();
        let (tensor, _) = tensors.iter().find(|(_, info)| holds(info)).unwrap();
        let tensor = format!("tensor {tensor:?}");
        let parts = [
            "here/rank-00001.safetensors",
            &tensor,
            "are not what was written: the file is damaged",
            "hint: --all lists all damage",
        ];
        place.assert_refused(&["checkpoint", "verify", "here"], &parts);
        place.printed(&["checkpoint", "inspect", "here"]);
    }
}

#[test]
fn all_damage_is_listed_when_it_is_asked_for() {
    let place = Place::saved();
    for file in ["here/rank-00000.safetensors", "here/rank-00001.safetensors"] {
        place.spoil(file, |bytes| *bytes.last_mut().unwrap() ^= 1);
    }
    let (code, stdout, stderr) = place.outcome(&["checkpoint", "verify", "here", "--all"]);
    assert_eq!((code, stderr.as_str()), (1, "error: here: damaged in 2 places\n"));
    let lines = Vec::from_iter(stdout.lines());
    assert!(lines.len() == 2, "{stdout}");
    for (line, file) in lines.iter().zip(["rank-00000", "rank-00001"]) {
        assert!(
            line.starts_with(&format!("checkpoint, here/{file}.safetensors: tensor \"0/")),
            "{line}"
        );
    }
}

#[test]
fn values_that_are_damaged_are_neither_merged_nor_compared() {
    let place = Place::saved();
    place.spoil("here/rank-00000.safetensors", |bytes| {
        let start = values_start(bytes);
        bytes[start..].iter_mut().for_each(|byte| *byte ^= 1);
    });
    place.assert_readers_refuse(
        "here",
        &["here/rank-00000.safetensors: tensor \"0/", "are not what was written"],
    );
    assert_eq!(place.names("."), ["here", "latest"], "nothing unfinished is left");
}

#[test]
fn files_that_are_cut_off_missing_or_of_another_kind_are_refused_by_every_command() {
    let place = Place::saved();
    let path = place.path("here/rank-00001.safetensors");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    place.assert_all_refuse("here", &["rank-00001.safetensors has", "it is not whole"]);
    fs::remove_file(&path).unwrap();
    place.assert_all_refuse("here", &["rank-00001.safetensors: No such file"]);
    fs::create_dir(&path).unwrap();
    place.assert_all_refuse("here", &["rank-00001.safetensors is not a file"]);
    fs::remove_dir(&path).unwrap();
    // What opens it waits for a writer, for ever.
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    place.assert_all_refuse("here", &["rank-00001.safetensors is not a file"]);
    fs::remove_file(&path).unwrap();
    let mut long_header = whole.clone();
    long_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&path, &long_header).unwrap();
    place.assert_readers_refuse(
        "here",
        &["rank-00001.safetensors: a header of 18446744073709551615 bytes"],
    );
    fs::write(&path, vec![b'x'; whole.len()]).unwrap();
    place.assert_readers_refuse("here", &["rank-00001.safetensors: a header of"]);
}

#[test]
fn indexes_that_are_damaged_foreign_newer_or_hostile_are_refused_by_every_command() {
    let place = Place::saved();
    let index = place.path("here/index.json");
    let whole = fs::read_to_string(&index).unwrap();
    fs::write(&index, whole.replacen("\"steps\": ", "\"steps\":  ", 1)).unwrap();
    place.assert_all_refuse("here", &["here/index.json: its contents are not what was written"]);
    fs::write(&index, &whole).unwrap();
    let text = place.index_without_hash("here");
    let long = "[".repeat(100_000);
    fs::write(&index, &text[..text.len() / 2]).unwrap();
    place.assert_all_refuse("here", &["here/index.json: not whole"]);
    for (content, said) in [
        ("", "not whole"),
        (long.as_str(), "not whole"),
        ("{\"format\": \"pt\"}", "it is not the index of a Sconce checkpoint"),
        ("[1]", "it is not the index of a Sconce checkpoint"),
        ("{\"format\": \"sconce checkpoint\"}", "it has no version"),
        ("{\"format\": \"sconce checkpoint\", \"version\": 1}", "missing field"),
    ] {
        fs::write(&index, content).unwrap();
        place.assert_all_refuse("here", &["here/index.json: ", said]);
    }
    let huge = "\"shape\": [4611686018427387904, 1,";
    for (from, to, said) in [
        (
            "\"version\": 1",
            "\"version\": 2",
            "version 2 is newer than this program",
        ),
        (
            "\"files\": {",
            "\"files\": {\"../../etc/passwd\": 1,",
            "leaves the checkpoint's folder",
        ),
        (
            "\"files\": {",
            "\"files\": {\"/etc/passwd\": 1,",
            "leaves the checkpoint's folder",
        ),
        ("\"start\": 0", "\"start\": 1", "are out of turn"),
        ("\"file\": \"rank-00000", "\"file\": \"../rank-00000", "are out of turn"),
        ("\"shape\": [", huge, "is too large"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&index, text.replacen(from, to, 1)).unwrap();
        place.assert_all_refuse("here", &["here/index.json: ", said]);
    }
}

#[test]
fn an_index_that_does_not_fit_its_files_is_refused_when_values_are_read() {
    let place = Place::saved();
    let index = place.path("here/index.json");
    let text = place.index_without_hash("here");
    for (from, to, said) in [
        ("\"tensor\": \"0/", "\"tensor\": \"7/", "it is not in the file"),
        (
            "\"dtype\": \"F32\"",
            "\"dtype\": \"BF16\"",
            "expected 3 elements of BF16",
        ),
        ("\"dtype\": \"F32\"", "\"dtype\": \"Q4\"", "expected 3 elements of Q4"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&index, text.replacen(from, to, 1)).unwrap();
        place.assert_readers_refuse("here", &["tensor \"", said]);
    }
    // Values that are not there at all.
    fs::write(&index, text.replace("\"value\"", "\"other\"")).unwrap();
    place.assert_refused(&["merge-weights", "here", "out"], &["\"first.bias\" has no values"]);
    // Elements that only the index has, as many as there are numbers for.
    let (elements, zero) = ("4611686018427387903", "\"0/first.bias/value/0\"");
    let entry = format!(
        "\"aaa\": {{\"shape\": [{elements}], \"arrays\": {{\"value\": [{{\"start\": 0, \"end\": {elements}, \"dtype\": \
         \"F32\", \"file\": \"rank-00000.safetensors\", \"tensor\": {zero}, \"hashes\": []}}]}}}},"
    );
    fs::write(
        &index,
        text.replace("\"parameters\": {", &format!("\"parameters\": {{{entry}")),
    )
    .unwrap();
    place.printed(&["checkpoint", "inspect", "here"]);
    place.assert_refused(
        &["checkpoint", "verify", "here"],
        &["expected 4611686018427387903 elements"],
    );
    place.assert_refused(
        &["checkpoint", "diff", "here", "here"],
        &["expected 4611686018427387903 elements"],
    );
    place.assert_refused(&["merge-weights", "here", "out"], &["aaa"]);
}

#[test]
fn folders_without_a_checkpoint_are_refused_by_every_command() {
    let place = Place::new();
    fs::create_dir_all(place.path("empty/.checkpoint_1.partial")).unwrap();
    place.assert_all_refuse("empty", &["no complete checkpoint in empty"]);
    place.assert_all_refuse("absent", &["absent/index.json: No such file"]);
    fs::create_dir_all(place.path("broken/checkpoint_7")).unwrap();
    place.assert_all_refuse(
        "broken",
        &["no complete checkpoint in broken: checkpoint, broken/checkpoint_7/index.json"],
    );
}
