//! A model whose computation is an op that works on the host.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor};
use candle_nn::Init;
use half::{bf16, f16};
use sconce_zero::{Unit, unit};

/// Opens a GPU, or what stands for one; says so where there is neither.
pub(crate) fn device() -> Option<Device> {
    match sconce_collectives::cuda::device_count() {
        Ok(count) if count > 0 => Some(Device::new_cuda_with_stream(0).unwrap()),
        _ => {
            println!("skipped: no driver of CUDA's is here, nor its stand-in");
            None
        }
    }
}

/// A number that depends on every element of a parameter, and a gradient of its shape that does.
#[derive(Clone, Copy)]
pub(crate) struct Probe {
    /// Whether the gradient has an element that is not finite.
    pub(crate) overflows: bool,
}

fn coefficient(element: usize) -> f32 {
    (element as f32 * 0.37).sin()
}

fn probed(values: &CpuStorage) -> CpuStorage {
    let wide: Vec<f32> = match values {
        CpuStorage::F32(values) => values.clone(),
        CpuStorage::BF16(values) => values.iter().map(|value| value.to_f32()).collect(),
        CpuStorage::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
        _ => panic!("parameters are f32, bf16 or f16"),
    };
    let sum = wide
        .iter()
        .enumerate()
        .map(|(element, value)| value * coefficient(element));
    CpuStorage::F32(vec![sum.sum()])
}

impl CustomOp1 for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((probed(storage), Shape::from(())))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let probed = probed(&storage.to_cpu_storage()?);
        Ok((storage.device().storage_from_cpu_storage(&probed)?, Shape::from(())))
    }

    fn bwd(&self, parameter: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        // Read now, so that parameters must be there in the backward.
        let wide = parameter.detach().to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let wide = wide.flatten_all()?.to_vec1::<f32>()?;
        let gradient = wide.iter().enumerate();
        let mut gradient: Vec<f32> = gradient
            .map(|(element, value)| 0.5 * value + coefficient(element))
            .collect();
        if self.overflows {
            gradient[3] = f32::INFINITY;
        }
        let gradient = Tensor::from_vec(gradient, parameter.shape(), &Device::Cpu)?;
        let gradient = gradient.to_dtype(parameter.dtype())?;
        gradient.to_device(parameter.device()).map(Some)
    }
}

/// Gives every finite number of a 16-bit parameter's dtype as a gradient, over and over.
pub(crate) struct EveryNumber;

impl CustomOp1 for EveryNumber {
    fn name(&self) -> &'static str {
        "every-number"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let zero = CpuStorage::F32(vec![0.0]);
        Ok((storage.device().storage_from_cpu_storage(&zero)?, Shape::from(())))
    }

    fn bwd(&self, parameter: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let all = (0..=u16::MAX).cycle().take(parameter.elem_count());
        let gradient = if parameter.dtype() == DType::BF16 {
            let numbers = all.map(bf16::from_bits);
            // candle's sums on the CPU make zeros of denormal bf16, where the processor's own rounding does.
            let normal = numbers.map(|number| if number.is_normal() { number } else { bf16::ZERO });
            Tensor::from_vec(Vec::from_iter(normal), parameter.shape(), parameter.device())
        } else {
            let numbers = all.map(f16::from_bits);
            let finite = numbers.map(|number| if number.is_finite() { number } else { f16::ZERO });
            Tensor::from_vec(Vec::from_iter(finite), parameter.shape(), parameter.device())
        };
        gradient.map(Some)
    }
}

pub(crate) type Layer = Unit<[Tensor; 2]>;

pub(crate) fn layer(vb: candle_nn::VarBuilder<'_>, name: &str, rows: usize) -> Result<Layer> {
    unit(vb, name, |vb| {
        Ok([random(&vb, (rows, 7), "weight")?, random(&vb, 5, "bias")?])
    })
}

pub(crate) fn random(vb: &candle_nn::VarBuilder<'_>, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
    vb.get_with_hints(shape, name, Init::Randn { mean: 0.0, stdev: 0.5 })
}
