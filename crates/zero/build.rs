//! Compiles the kernels for GPUs, with the feature `cuda`: for what `CUDA_COMPUTE_CAP` says or else the GPU that is here,
//! as candle's are.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cudaforge::KernelBuilder::new()
        .source_files(["src/device/kernels.cu"])
        .arg("-std=c++17")
        .arg("-O3")
        // Fused operations would round otherwise than the CPU does.
        .arg("--fmad=false")
        .build_ptx()?;
    Ok(())
}
