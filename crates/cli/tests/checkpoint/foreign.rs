//! Checkpoints of other systems are told what they are, and how they become safetensors; they are never opened.

use super::Place;
use std::fs;

/// Makes files that nobody can read: who opens one fails the test with another message.
fn with_files(files: &[&str]) -> Place {
    let place = Place::new();
    for file in files {
        let path = place.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink("/nowhere", &path).unwrap();
    }
    place
}

const NEVER: &str = "which can execute code when it is read, so Sconce does not";

#[test]
fn a_distributed_checkpoint_of_pytorch_is_refused_with_its_conversion() {
    let place = with_files(&["model_0/.metadata", "model_0/__0_0.distcp", "model_0/__1_0.distcp"]);
    let parts = [
        "model_0: this is a distributed checkpoint of PyTorch, ",
        NEVER,
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save",
        "weights_only=True",
        "\" 'model_0'\n",
    ];
    place.assert_all_refuse("model_0", &parts);
    place.assert_all_refuse("model_0/__1_0.distcp", &parts);
}

#[test]
fn in_a_folder_of_accelerate_it_is_the_model_that_is_meant() {
    let place = with_files(&[
        "fsdp/optimizer_0/.metadata",
        "fsdp/pytorch_model_fsdp_0/.metadata",
        "fsdp/random_states_0.pkl",
        "plain/optimizer.bin",
        "plain/pytorch_model.bin",
        "plain/random_states_0.pkl",
    ]);
    place.assert_all_refuse(
        "fsdp",
        &["error: fsdp/pytorch_model_fsdp_0: this is a distributed checkpoint of PyTorch"],
    );
    place.assert_all_refuse("plain", &["error: plain/pytorch_model.bin: this is a Python pickle"]);
}

#[test]
fn a_checkpoint_of_deepspeed_is_refused_with_its_conversion() {
    let place = with_files(&[
        "ds/global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "ds/global_step7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "ds/zero_to_fp32.py",
        "dp/global_step7/mp_rank_00_model_states.pt",
    ]);
    for folder in ["ds", "dp"] {
        fs::write(place.path(folder).join("latest"), "global_step7\n").unwrap();
        let command = format!(
            "python -m deepspeed.utils.zero_to_fp32 --safe_serialization --tag 'global_step7' '{folder}' OUTPUT_FOLDER"
        );
        let parts = [
            &format!("{folder}: this is a checkpoint of DeepSpeed, "),
            NEVER,
            &command,
        ];
        place.assert_all_refuse(folder, &parts);
        place.assert_all_refuse(&format!("{folder}/global_step7"), &parts);
    }
    place.assert_all_refuse("ds/global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt", &[NEVER]);
}

#[test]
fn pickles_are_refused_with_their_conversion() {
    for name in ["pytorch_model.bin", "model.pt", "it's.pth", "WEIGHTS.BIN", "last.ckpt"] {
        let place = with_files(&[&format!("folder/{name}")]);
        let quoted = format!("' {}", name.replace('\'', r"'\''")).replace("' ", "\" 'folder/") + "'\n";
        let parts = [
            &format!("folder/{name}: this is a Python pickle, "),
            NEVER,
            "torch.load(sys.argv[1], map_location='cpu', weights_only=True)",
            &quoted,
        ];
        place.assert_all_refuse("folder", &parts);
        place.assert_all_refuse(&format!("folder/{name}"), &parts);
    }
}
