//! `--gpu_ids`, and what is asked of devices that no rank could give.

use super::*;

const SCRIPT: &str = "echo ${CUDA_VISIBLE_DEVICES-unset}";

#[test]
fn ranks_see_the_gpus_that_are_listed_in_that_order() {
    for flag in ["--gpu_ids", "--gpu-ids"] {
        let mut launch = Launch::new(&["-n", "2", flag, "2,0"], SCRIPT);
        // The flag wins, as in Accelerate.
        launch.command.env("CUDA_VISIBLE_DEVICES", "5");
        assert_eq!(sorted(&launch.output().stdout), ["[rank 0] 2,0", "[rank 1] 2,0"]);
    }
}

#[test]
fn without_the_flag_or_with_all_ranks_inherit_what_the_launcher_sees() {
    for flags in [&[][..], &["--gpu_ids", "all"]] {
        let mut launch = Launch::new(flags, SCRIPT);
        assert_eq!(text(&launch.output().stdout), "unset\n");
        launch.command.env("CUDA_VISIBLE_DEVICES", "1,3");
        assert_eq!(text(&launch.output().stdout), "1,3\n");
    }
}

#[test]
fn a_list_that_cannot_be_is_one_error_before_anything_starts() {
    for (flags, variable, message) in [
        (&["--gpu_ids", "0,0"][..], "", "GPU 0 is named twice"),
        (&["--gpu_ids", "-1"], "", "`-1` is not the number of a GPU"),
        (&["--gpu_ids", "-1,0"], "", "`-1` is not the number of a GPU"),
        (&["--gpu_ids", "0,one"], "", "`one` is not the number of a GPU"),
        (&["--gpu_ids", ""], "", "`` is not the number of a GPU"),
        (
            &["-n", "3", "--gpu_ids", "0,2"],
            "",
            "--gpu_ids names 2 GPUs for 3 ranks of a host\nhint: name one for each rank",
        ),
        (
            &["--cpu", "--gpu_ids", "0"],
            "",
            "--gpu_ids has no effect with --cpu\nhint: ",
        ),
        (
            &["--gpu_ids", "3"],
            "cuda:1",
            "SCONCE_DEVICE=cuda:1 is not among the 1 GPU of --gpu_ids\nhint: ranks count from 0",
        ),
        (&[], "gpu", "SCONCE_DEVICE=\"gpu\": expected cpu, cuda"),
        (&["--cpu"], "cuda", "SCONCE_DEVICE=\"cuda\": ACCELERATE_USE_CPU"),
        (
            &[],
            "metal",
            "device metal requested, but Sconce does not compute on Metal",
        ),
    ] {
        let mut launch = Launch::new(flags, "echo started");
        launch.command.env("SCONCE_DEVICE", variable);
        let output = launch.output();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {output:?}");
        let stderr = text(&output.stderr);
        assert!(
            stderr.starts_with("error: ") && stderr.contains(message) && output.stdout.is_empty(),
            "{flags:?}: {stderr}"
        );
    }
}

#[test]
fn ranks_may_have_one_gpu_in_common_if_they_name_it() {
    let mut launch = Launch::new(&["-n", "3", "--gpu_ids", "4"], SCRIPT);
    launch.command.env("SCONCE_DEVICE", "cuda:0");
    assert_eq!(
        sorted(&launch.output().stdout),
        ["[rank 0] 4", "[rank 1] 4", "[rank 2] 4"]
    );
}
