//! Requests for a device, in builds with CUDA and without, on machines that may have none.

use sconce_core::{AcceleratorBuilder, DeviceRequest, World};

fn lookup(variables: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
    |name| {
        let found = variables.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| (*value).to_owned())
    }
}

fn request(variables: &[(&str, &str)]) -> Result<DeviceRequest, String> {
    DeviceRequest::from_lookup(lookup(variables)).map_err(|error| error.to_string())
}

#[test]
fn the_environment_names_a_device() {
    assert_eq!(request(&[]), Ok(DeviceRequest::Cpu));
    assert_eq!(request(&[("ACCELERATE_USE_CPU", "True")]), Ok(DeviceRequest::Cpu));
    assert_eq!(request(&[("SCONCE_DEVICE", "cuda")]), Ok(DeviceRequest::GpuOfLocalRank));
    assert_eq!(request(&[("SCONCE_DEVICE", "CUDA:12")]), Ok(DeviceRequest::Gpu(12)));
    let over_nccl = if cfg!(feature = "nccl") {
        DeviceRequest::GpuOfLocalRank
    } else {
        DeviceRequest::Cpu // the backend is refused when ranks join
    };
    assert_eq!(request(&[("SCONCE_BACKEND", "nccl")]), Ok(over_nccl));
    for wrong in ["gpu", "cuda:", "cuda:-1", "cuda:x"] {
        let message = request(&[("SCONCE_DEVICE", wrong)]).unwrap_err();
        assert!(
            message.contains(wrong) && message.contains("expected cpu, cuda"),
            "{message}"
        );
    }
}

#[test]
fn what_is_asked_for_is_told_apart_from_what_the_backend_decides() {
    let asked_for = |variables: &[_]| DeviceRequest::asked_for(lookup(variables)).unwrap();
    for nothing in [
        ("SCONCE_BACKEND", "nccl"),
        ("SCONCE_BACKEND", "none of them"),
        ("ACCELERATE_USE_CPU", "false"),
        ("SCONCE_DEVICE", " "),
    ] {
        assert_eq!(asked_for(&[nothing]), None, "{nothing:?}");
    }
    assert_eq!(asked_for(&[("ACCELERATE_USE_CPU", "true")]), Some(DeviceRequest::Cpu));
    assert_eq!(asked_for(&[("SCONCE_DEVICE", "cuda:2")]), Some(DeviceRequest::Gpu(2)));
}

#[test]
fn metal_is_refused_by_name() {
    for device in ["metal", "Metal:0"] {
        let message = request(&[("SCONCE_DEVICE", device)]).unwrap_err();
        let expected = format!(
            "device {} requested, but Sconce does not compute on Metal: it runs on Linux, where there is none; use cpu or cuda",
            device.to_lowercase()
        );
        assert_eq!(message, expected);
    }
}

#[test]
fn a_gpu_where_the_cpu_is_asked_for_is_a_contradiction() {
    let both = [("SCONCE_DEVICE", "cuda:1"), ("ACCELERATE_USE_CPU", "True")];
    let message = request(&both).unwrap_err();
    assert!(
        message.contains("SCONCE_DEVICE=\"cuda:1\"") && message.contains("--cpu"),
        "{message}"
    );
}

#[test]
fn a_gpu_that_cannot_be_had_is_one_clear_error() {
    if has_driver() {
        println!("skipped: this machine has a driver");
        return;
    }
    let reason = if cfg!(feature = "cuda") {
        "device cuda:0 requested, but libcuda.so.1 (the NVIDIA driver) is not present: install the driver"
    } else {
        "device cuda:0 requested, but this program was built without CUDA: build it with `--features cuda`"
    };
    let opened = DeviceRequest::Gpu(0).open(&World::single());
    let message = opened.unwrap_err().to_string();
    assert!(message.starts_with(reason), "{message}");
    let lookup = |name: &str| (name == "SCONCE_DEVICE").then(|| "cuda:0".to_owned());
    let built = AcceleratorBuilder::default().build_with(lookup);
    assert_eq!(built.err().map(|error| error.to_string()), Some(message.clone()));
    let built = AcceleratorBuilder::default()
        .device(DeviceRequest::Gpu(0))
        .build_with(|_| None);
    assert_eq!(built.err().map(|error| error.to_string()), Some(message));
}

fn has_driver() -> bool {
    cfg!(feature = "cuda") && std::path::Path::new("/dev/nvidiactl").exists()
}

#[test]
fn a_gpu_that_is_there_computes_and_another_number_is_refused() {
    if !has_driver() {
        println!("skipped: this build or machine has no GPU");
        return;
    }
    let device = DeviceRequest::Gpu(0).open(&World::single()).unwrap();
    let values = candle_core::Tensor::arange(0f32, 6.0, &device)
        .unwrap()
        .reshape((2, 3))
        .unwrap();
    let product = values.matmul(&values.t().unwrap()).unwrap();
    assert_eq!(product.to_vec2::<f32>().unwrap(), [[5.0, 14.0], [14.0, 50.0]]);
    let message = DeviceRequest::Gpu(1000).open(&World::single()).unwrap_err().to_string();
    assert!(
        message.starts_with("device cuda:1000 requested, but this process may use "),
        "{message}"
    );
}

#[test]
fn the_program_decides_before_the_environment() {
    let lookup = |name: &str| (name == "SCONCE_DEVICE").then(|| "cuda:0".to_owned());
    let accelerator = AcceleratorBuilder::default()
        .device(DeviceRequest::Cpu)
        .build_with(lookup);
    assert!(accelerator.unwrap().device().is_cpu());
}
