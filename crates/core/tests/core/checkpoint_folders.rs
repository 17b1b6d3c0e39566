//! Whose a folder of checkpoints is: one run's at a time, with files of the program's own, and one on each host if asked for.

use super::checkpoints::{Model, start, strategy};
use super::{bits, build, flat, on_ranks};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::Communicator;
use sconce_core::checkpoint::{Checkpoints, LoadOptions};
use sconce_core::{Accelerator, AcceleratorBuilder, AdamW, ParameterSet, Weights, World};
use std::fs;
use std::sync::{Arc, Mutex};

#[test]
fn one_folder_keeps_the_checkpoints_of_one_run_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints {
        folder: folder.path().into(),
        total_limit: None,
    };
    let builder = || AcceleratorBuilder::default().checkpoints(checkpoints.clone());
    let first = build(builder());
    let of_first = first.for_another_model(ParameterSet::none()).unwrap();
    drop(first);
    let refused = builder().build_with(|_| None).unwrap_err().to_string();
    let parts = [
        "another run keeps its checkpoints here",
        &format!("process {}", std::process::id()),
        "name another folder",
    ];
    assert!(parts.iter().all(|part| refused.contains(part)), "{refused}");
    drop(of_first);
    build(builder()).save_checkpoint().unwrap();
}

/// What a test's hook fails with, where it does.
fn fails_on(rank: usize, own: usize) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if rank == own { Err("out of luck".into()) } else { Ok(()) }
}

#[test]
fn hooks_add_files_to_checkpoints_and_read_them_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints {
        folder: folder.path().join("checkpoints"),
        total_limit: Some(2),
    };
    let builder = || AcceleratorBuilder::default().checkpoints(checkpoints.clone());
    on_ranks(2, |communicator| {
        let mut run = start(communicator, builder(), 5);
        run.train(1, |_, _| ());
        let rank = run.acc.world().rank;
        let _kept = run.acc.register_save_state_pre_hook(move |folder| {
            assert!(folder.to_string_lossy().contains(".partial"), "not published yet");
            fs::create_dir_all(folder.join("own"))?;
            Ok(fs::write(folder.join(format!("own/{rank}")), format!("of {rank}"))?)
        });
        let calls = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&calls);
        let removed = run.acc.register_save_state_pre_hook(move |_| {
            *counted.lock().unwrap() += 1;
            Ok(())
        });
        run.acc.save_checkpoint().unwrap();
        removed.remove();
        let path = run.acc.save_checkpoint_in_background().unwrap();
        run.acc.finish_saving().unwrap();
        assert_eq!(*calls.lock().unwrap(), 1, "not after it was removed");
        assert_eq!(fs::read_to_string(path.join("own/1")).unwrap(), "of 1");
    });
    on_ranks(2, |communicator| {
        let mut run = start(communicator, builder(), 5);
        let rank = run.acc.world().rank;
        let read = Arc::new(Mutex::new(String::new()));
        let seen = Arc::clone(&read);
        run.acc.register_load_state_pre_hook(move |folder| {
            *seen.lock().unwrap() = fs::read_to_string(folder.join(format!("own/{rank}")))?;
            Ok(())
        });
        let weights_only = LoadOptions {
            weights_only: true,
            ..LoadOptions::default()
        };
        run.acc.load_state_with(&checkpoints.folder, &weights_only).unwrap();
        assert_eq!(*read.lock().unwrap(), "", "weights alone");
        run.acc.load_latest().unwrap().unwrap();
        assert_eq!(*read.lock().unwrap(), format!("of {rank}"));
        run.train(1, |_, _| ());
        let before = run.values();
        let failing = run.acc.register_load_state_pre_hook(move |_| fails_on(1, rank));
        let error = run.acc.load_latest().unwrap_err().to_string();
        let is_told = error.contains("rank 1: ") && error.contains("before loading, hook 1: out of luck");
        assert!(rank != 0 || is_told, "{error}");
        assert_eq!(run.values(), before, "nothing is loaded in part");
        failing.remove();
        // What hooks write is pruned with the rest.
        run.acc.save_checkpoint().unwrap();
    });
    assert!(!checkpoints.folder.join("checkpoint_0").exists());
    assert!(checkpoints.folder.join("checkpoint_1/own/0").exists());
}

#[test]
fn a_hook_that_fails_on_one_rank_fails_the_save_on_all_and_nothing_is_published() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints {
        folder: folder.path().join("checkpoints"),
        total_limit: None,
    };
    on_ranks(3, |communicator| {
        let run = start(
            communicator,
            AcceleratorBuilder::default().checkpoints(checkpoints.clone()),
            5,
        );
        let rank = run.acc.world().rank;
        let failing = run.acc.register_save_state_pre_hook(move |folder| {
            fs::write(folder.join(format!("own {rank}")), "left behind")?;
            fails_on(2, rank)
        });
        for save in [
            run.acc.save_checkpoint(),
            run.acc.save_checkpoint_in_background(),
            run.acc.save_state(folder.path().join("here")),
        ] {
            let error = save.unwrap_err().to_string();
            let is_told = error.contains("rank 2: ") && error.contains("before saving, hook 0: out of luck");
            assert!(rank != 0 || is_told, "{error}");
        }
        run.acc.wait_for_everyone().unwrap();
        let left = fs::read_dir(&checkpoints.folder).unwrap();
        let left = Vec::from_iter(left.map(|entry| entry.unwrap().file_name()));
        assert_eq!(left, [".lock"]);
        failing.remove();
        assert!(run.acc.save_checkpoint().unwrap().ends_with("checkpoint_0"));
        // A name of the checkpoint's own is not a hook's to take, and ranks have as many hooks.
        let taking = run
            .acc
            .register_save_state_pre_hook(|folder| Ok(fs::write(folder.join("index.json"), "{}")?));
        let error = run.acc.save_checkpoint().unwrap_err().to_string();
        assert!(rank != 0 || error.contains("index.json: File exists"), "{error}");
        taking.remove();
        let _one = (rank == 1).then(|| run.acc.register_save_state_pre_hook(|_| Ok(())));
        let error = run.acc.save_checkpoint().unwrap_err().to_string();
        assert!(
            error.contains("before saving") && error.contains("rank 1 has 1 hooks"),
            "{error}"
        );
    });
}

/// Says that ranks are on hosts of two each.
fn on_two_hosts(communicator: Arc<dyn Communicator>, builder: AcceleratorBuilder) -> AcceleratorBuilder {
    let rank = communicator.rank();
    let world = World {
        rank,
        size: communicator.size(),
        local_rank: rank % 2,
        local_size: 2,
        node_rank: rank / 2,
        ..World::single()
    };
    builder.communicator_of(world, communicator)
}

#[test]
fn hosts_without_a_common_folder_have_a_whole_checkpoint_each() {
    let folder = tempfile::tempdir().unwrap();
    let hosts = [folder.path().join("a"), folder.path().join("b")];
    let checkpoints = |host: usize| Checkpoints {
        folder: hosts[host].clone(),
        total_limit: Some(1),
    };
    let start = |communicator: Arc<dyn Communicator>| {
        let host = communicator.rank() / 2;
        let builder = AcceleratorBuilder::default()
            .strategy(strategy(3))
            .checkpoints(checkpoints(host))
            .save_on_each_node(true);
        let acc = build(on_two_hosts(communicator, builder));
        let model = Model::new(acc.var_builder(Weights::Random { seed: 4 }).unwrap(), 5);
        acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
        (acc, model, host)
    };
    let values = |acc: &dyn Accelerator| {
        let tensors = acc.engine().tensors(true).unwrap();
        Vec::from_iter(tensors.iter().flat_map(|(_, tensor)| bits(&flat(tensor))))
    };
    let saved = on_ranks(4, |communicator| {
        let (acc, model, host) = start(communicator);
        acc.save_checkpoint().unwrap();
        let batch = [
            Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap(),
            Tensor::zeros((2, 1), DType::F32, &Device::Cpu).unwrap(),
        ];
        acc.backward(&model.loss(&batch)).unwrap();
        acc.engine().step(0.1).unwrap();
        let path = acc.save_checkpoint_in_background().unwrap();
        acc.finish_saving().unwrap();
        assert_eq!(path, hosts[host].join("checkpoint_1"));
        values(&*acc)
    });
    let names = |host: usize| {
        let entries = fs::read_dir(hosts[host].join("checkpoint_1")).unwrap();
        let mut names = Vec::from_iter(entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
        names.sort();
        names
    };
    assert_eq!(names(0).len(), 5);
    assert_eq!(names(0), names(1));
    for name in names(0) {
        let [a, b] = [0, 1].map(|host: usize| fs::read(hosts[host].join("checkpoint_1").join(&name)).unwrap());
        assert!(a == b, "{name}");
    }
    assert!(
        hosts.iter().all(|host| !host.join("checkpoint_0").exists()),
        "pruned on each"
    );
    // Ranks read what their host has; one host alone serves any number of ranks.
    let resumed = on_ranks(4, |communicator| {
        let (acc, _model, host) = start(communicator);
        let loaded = acc.load_latest().unwrap().unwrap();
        assert_eq!(loaded.folder, hosts[host].join("checkpoint_1"));
        values(&*acc)
    });
    assert_eq!(resumed, saved);
    let resumed = on_ranks(3, |communicator| {
        let acc = build(AcceleratorBuilder::default().communicator(communicator));
        let _model = Model::new(acc.var_builder(Weights::Random { seed: 4 }).unwrap(), 5);
        acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
        acc.load_state(&hosts[1]).unwrap();
        values(&*acc)
    });
    assert_eq!(resumed[0], saved[0]);
    fs::remove_file(hosts[1].join("checkpoint_1/rank-00000.safetensors")).unwrap();
    let told = on_ranks(4, |communicator| {
        start(communicator).0.load_latest().unwrap_err().to_string()
    });
    let parts = [
        "rank 2: ",
        "rank-00000.safetensors: No such file",
        "copy the folder from a host where it is whole",
    ];
    assert!(parts.iter().all(|part| told[0].contains(part)), "{told:?}");
}
