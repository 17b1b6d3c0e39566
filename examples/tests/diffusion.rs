//! The noise schedule, its loss and sampling against closed forms in f64 and what diffusers recorded; encoded videos on disk.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Result;
use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::VarBuilder;
use sconce_core::Dataset as _;
use sconce_examples::diffusion::{
    DdimSampler, Draw, NoiseSchedule, Prompt, VideoSamples, contact_sheet, fill_patches, normal_noise, sample_video,
};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{CogVideoXConfig, CogVideoXTransformer};
use serde_json::{Value, json};

fn file() -> &'static Path {
    Path::new("scheduler_config.json")
}

/// The configuration that the published pipelines have, with other values for some keys.
fn schedule(changes: Value) -> Result<NoiseSchedule> {
    let mut config = json!({
        "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
        "prediction_type": "v_prediction", "rescale_betas_zero_snr": true, "snr_shift_scale": 3.0,
        "timestep_spacing": "trailing", "set_alpha_to_one": true,
    });
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    NoiseSchedule::from_json(&config.to_string(), file())
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let wide = tensor.to_dtype(DType::F64).unwrap();
    wide.flatten_all().unwrap().to_vec1().unwrap()
}

fn close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= tolerance * (1.0 + expected.abs()),
            "{what}: {found}, expected {expected}"
        );
    }
}

/// The share of signal, by sums of logarithms and ratios of signal to noise, which the shift divides.
fn closed_form(shift: f64, ends_in_noise: bool) -> Vec<f64> {
    let root = |t: usize| 0.00085f64.sqrt() + (0.012f64.sqrt() - 0.00085f64.sqrt()) * t as f64 / 999.0;
    let mut logarithm = 0.0;
    let shifted = Vec::from_iter((0..1000).map(|t| {
        logarithm += (-root(t).powi(2)).ln_1p();
        let ratio = 1.0 / (-logarithm).exp_m1() / shift;
        ratio / (1.0 + ratio)
    }));
    if !ends_in_noise {
        return shifted;
    }
    let line = |t: usize| (shifted[t].sqrt() - shifted[999].sqrt()) / (shifted[0].sqrt() - shifted[999].sqrt());
    (0..1000).map(|t| (shifted[0].sqrt() * line(t)).powi(2)).collect()
}

#[test]
fn the_schedule_is_the_closed_form_and_ends_in_noise_alone() -> Result<()> {
    for (shift, ends_in_noise) in [(3.0, true), (1.0, true), (3.0, false), (1.0, false)] {
        let schedule = schedule(json!({"snr_shift_scale": shift, "rescale_betas_zero_snr": ends_in_noise}))?;
        let found = Vec::from_iter((0..schedule.steps()).map(|t| schedule.alpha(t)));
        close(
            &found,
            &closed_form(shift, ends_in_noise),
            1e-12,
            &format!("shift {shift}"),
        );
        assert_eq!(found[999] == 0.0, ends_in_noise);
        assert!(found.is_sorted_by(|a, b| a > b));
    }
    Ok(())
}

#[test]
fn schedules_and_sampled_trajectories_are_those_of_diffusers() -> Result<()> {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/cogvideox_schedules.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(fixture)?)?;
    let list = |value: &Value| Vec::from_iter(value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()));
    for case in fixture["cases"].as_array().unwrap() {
        let schedule = NoiseSchedule::from_json(&case["config"].to_string(), file())?;
        let what = format!("{} in {} steps", case["config"]["timestep_spacing"], case["steps"]);
        let places = (0..1000).step_by(37).chain([999]);
        let alphas = Vec::from_iter(places.map(|t| schedule.alpha(t)));
        close(&alphas, &list(&case["alphas_cumprod"]), 1e-12, &what);
        let sampler = DdimSampler::new(&schedule, case["steps"].as_u64().unwrap() as usize)?;
        let timesteps = Vec::from_iter(sampler.timesteps().iter().map(|t| *t as f64));
        assert_eq!(timesteps, list(&case["timesteps"]), "{what}");
        let mut trajectory = Vec::new();
        let start = Tensor::new(&[[0.3f32, -1.2, 0.05, 2.0]], &Device::Cpu)?;
        let end = sampler.sample(start, |latents, t| {
            trajectory.push(numbers(latents));
            Ok((latents.tanh()? * (0.2 + 0.001 * t as f64))?)
        })?;
        trajectory.push(numbers(&end));
        close(&trajectory[1], &list(&case["trajectory"][0]), 1e-5, &what);
        close(
            &trajectory[trajectory.len() - 1],
            &list(&case["trajectory"][1]),
            2e-5,
            &what,
        );
    }
    Ok(())
}

#[test]
fn videos_are_sampled_as_by_the_pipeline_with_and_without_guidance() -> Result<()> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let recorded = safetensors::load(fixtures.join("cogvideox_samples.safetensors"), &Device::Cpu)?;
    for (variant, size, shift, guidance) in [
        ("rotary", "8x8", 1.0, 6.0),
        // Positions of other sizes than the configured one are stretched.
        ("rotary", "6x10", 1.0, 2.0),
        ("rotary", "12x4", 1.0, 2.0),
        ("sincos", "8x8", 3.0, 1.0),
    ] {
        let folder = ModelFolder::open(&fixtures.join("tiny-cogvideox").join(variant))?;
        let config = CogVideoXConfig::from_model_folder(&folder)?;
        let weights = safetensors::load(&folder.weights[0], &Device::Cpu)?;
        let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        let model = CogVideoXTransformer::new(&config, None, vb)?;
        let tensor = |name: &str| &recorded[&format!("{variant}.{size}.{name}")];
        let prompt = Prompt {
            text: tensor("text"),
            negative: Some(tensor("negative")),
            guidance,
            image: None,
        };
        let schedule = schedule(json!({"snr_shift_scale": shift}))?;
        let found = sample_video(&model, &schedule, tensor("noise"), prompt, 5, DType::F32)?;
        close(
            &numbers(&found),
            &numbers(tensor("latents")),
            1e-4,
            &format!("{variant} {size}"),
        );
    }
    Ok(())
}

/// Where all data is one point, the exact velocity is known, and every sample moves towards it on a known way.
#[test]
fn sampling_with_the_exact_velocity_follows_the_closed_form_to_the_point() -> Result<()> {
    let point = [1.5f64, -0.25, 0.0];
    let noise = [0.4f64, -2.0, 1.0];
    for (shift, steps) in [(3.0, 10), (1.0, 50), (1.0, 1)] {
        let schedule = schedule(json!({"snr_shift_scale": shift}))?;
        let sampler = DdimSampler::new(&schedule, steps)?;
        let target = Tensor::new(&[point], &Device::Cpu)?.to_dtype(DType::F32)?;
        let start = Tensor::new(&[noise], &Device::Cpu)?.to_dtype(DType::F32)?;
        let end = sampler.sample(start, |latents, t| {
            let alpha = schedule.alpha(t);
            let way = Vec::from_iter(
                point
                    .iter()
                    .zip(noise)
                    .map(|(x, noise)| alpha.sqrt() * x + (1.0 - alpha).sqrt() * noise),
            );
            close(&numbers(latents), &way, 1e-5, &format!("time step {t}"));
            Ok((((latents * alpha.sqrt())? - &target)? / (1.0 - alpha).sqrt())?)
        })?;
        close(&numbers(&end), &point, 1e-5, "the end");
    }
    Ok(())
}

#[test]
fn noise_is_mixed_in_and_taken_out_and_the_loss_is_that_of_velocities() -> Result<()> {
    let schedule = schedule(json!({}))?;
    let draw = |sample| Draw {
        seed: 1,
        step: 2,
        sample,
    };
    let shape = (3, 2, 4, 2, 2);
    let [latents, noise, error] = [0, 1, 2].map(|sample| normal_noise(draw(sample), shape, &Device::Cpu).unwrap());
    let timesteps = [0, 500, 999];
    let noisy = schedule.add_noise(&latents, &noise, &timesteps)?;
    let (x, e, d) = (numbers(&latents), numbers(&noise), numbers(&error));
    let alpha = |i: usize| schedule.alpha(timesteps[i / 32]);
    let expected = Vec::from_iter((0..96).map(|i| alpha(i).sqrt() * x[i] + (1.0 - alpha(i)).sqrt() * e[i]));
    close(&numbers(&noisy), &expected, 1e-6, "noisy");

    let exact = Vec::from_iter((0..96).map(|i| (alpha(i).sqrt() * e[i] - (1.0 - alpha(i)).sqrt() * x[i]) as f32));
    let exact = Tensor::from_vec(exact, shape, &Device::Cpu)?;
    close(
        &numbers(&schedule.without_noise(&exact, &noisy, &timesteps)?),
        &x,
        1e-5,
        "without noise",
    );
    let nothing = schedule
        .loss(&exact, &noisy, &latents, &timesteps)?
        .to_scalar::<f32>()?;
    assert!(nothing < 1e-8, "{nothing}");
    let off = schedule
        .loss(&(exact + error)?, &noisy, &latents, &timesteps)?
        .to_scalar::<f32>()?;
    let mean = d.iter().map(|d| d * d).sum::<f64>() / 96.0;
    close(&[f64::from(off)], &[mean], 1e-4, "loss");
    Ok(())
}

#[test]
fn noise_is_normal_and_depends_on_seed_step_and_sample_alone() -> Result<()> {
    let draw = Draw {
        seed: 3,
        step: 5,
        sample: 7,
    };
    let noise = |draw| numbers(&normal_noise(draw, 100_000, &Device::Cpu).unwrap());
    let values = noise(draw);
    assert_eq!(values, noise(draw));
    let moment = |power: i32| values.iter().map(|value| value.powi(power)).sum::<f64>() / 1e5;
    // Within five standard deviations of each moment's estimate.
    for (power, expected, tolerance) in [(1, 0.0, 0.016), (2, 1.0, 0.023), (3, 0.0, 0.062), (4, 3.0, 0.16)] {
        assert!(
            (moment(power) - expected).abs() < tolerance,
            "moment {power}: {}",
            moment(power)
        );
    }
    for other in [
        Draw { seed: 4, ..draw },
        Draw { step: 6, ..draw },
        Draw { sample: 8, ..draw },
    ] {
        assert_ne!(noise(other)[..8], values[..8]);
    }
    let steps = Vec::from_iter((0..2000).map(|sample| Draw { sample, ..draw }.timestep(10)));
    for t in 0..10 {
        let count = steps.iter().filter(|step| **step == t).count();
        assert!((130..270).contains(&count), "time step {t} came {count} times");
    }
    Ok(())
}

#[test]
fn the_first_frame_fills_up_patches_in_time() -> Result<()> {
    let latents = Tensor::arange(0f32, 6.0, &Device::Cpu)?.reshape((1, 3, 2))?;
    assert_eq!(numbers(&fill_patches(&latents, 2)?), [0., 1., 0., 1., 2., 3., 4., 5.]);
    assert_eq!(numbers(&fill_patches(&latents, 1)?), numbers(&latents));
    assert_eq!(fill_patches(&latents, 3)?.dims(), [1, 3, 2]);
    Ok(())
}

#[test]
fn schedules_that_are_not_implemented_are_refused_by_name() {
    for (changes, words) in [
        (
            json!({"prediction_type": "epsilon"}),
            "`prediction_type` is \"epsilon\", supported is \"v_prediction\"",
        ),
        (json!({"beta_schedule": "linear"}), "`beta_schedule` is \"linear\""),
        (json!({"trained_betas": [0.1]}), "`trained_betas` is given"),
        (json!({"num_train_timesteps": 1}), "`num_train_timesteps` is 1"),
        (json!({"beta_end": 1.5}), "`beta_end` 1.5"),
        (json!({"snr_shift_scale": 0.0}), "`snr_shift_scale` is 0"),
        (json!({"timestep_spacing": "random"}), "random"),
    ] {
        let message = format!("{:#}", schedule(changes).unwrap_err());
        assert!(
            message.contains(words) && message.contains("scheduler_config.json"),
            "{message}"
        );
    }
    let schedule = schedule(json!({})).unwrap();
    assert!(DdimSampler::new(&schedule, 0).is_err() && DdimSampler::new(&schedule, 1001).is_err());
    let one = Tensor::zeros((1, 2), DType::F32, &Device::Cpu).unwrap();
    let message = schedule.add_noise(&one, &one, &[1000]).unwrap_err().to_string();
    assert!(message.contains("time step 1000 is not below 1000"), "{message}");
}

/// Shards of samples whose latents are their own numbers.
fn write_shard(path: &Path, samples: std::ops::Range<usize>, channels: usize) {
    let count = samples.len();
    let numbers = Vec::from_iter(samples.map(|sample| sample as f32));
    let first = Tensor::from_vec(numbers, (count, 1, 1, 1, 1), &Device::Cpu).unwrap();
    let frames = Tensor::arange(0f32, 3.0, &Device::Cpu)
        .unwrap()
        .reshape((1, 1, 3, 1, 1))
        .unwrap();
    let latents = (first * 10.0).unwrap().broadcast_add(&frames).unwrap();
    let latents = latents
        .broadcast_as((count, channels, 3, 2, 2))
        .unwrap()
        .contiguous()
        .unwrap();
    let text = Tensor::ones((count, 4, 5), DType::BF16, &Device::Cpu).unwrap();
    safetensors::save(&HashMap::from([("latents", latents), ("prompt_embeds", text)]), path).unwrap();
}

#[test]
fn samples_are_found_across_shards_with_frames_before_channels() -> Result<()> {
    let folder = tempfile::tempdir()?;
    write_shard(&folder.path().join("b.safetensors"), 3..5, 2);
    write_shard(&folder.path().join("a.safetensors"), 0..3, 2);
    let samples = VideoSamples::open(folder.path(), false)?;
    assert_eq!(
        (samples.len(), samples.latent_shape(), samples.text_shape()),
        (5, [3, 2, 2, 2], [4, 5])
    );
    let batch = samples.batch(&[4, 0, 2], &Device::Cpu).unwrap();
    assert_eq!(batch.samples, [4, 0, 2]);
    assert_eq!(batch.latents.dims(), [3, 3, 2, 2, 2]);
    assert_eq!((batch.text.dtype(), batch.text.dims()), (DType::F32, &[3, 4, 5][..]));
    let firsts = batch.latents.narrow(2, 0, 1)?.narrow(3, 0, 1)?.narrow(4, 0, 1)?;
    assert_eq!(numbers(&firsts), [40., 41., 42., 0., 1., 2., 20., 21., 22.]);
    Ok(())
}

#[test]
fn shards_that_do_not_fit_are_refused_by_name() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let refused = |images| format!("{:#}", VideoSamples::open(folder.path(), images).unwrap_err());
    assert!(refused(false).contains("has no *.safetensors files"));
    write_shard(&folder.path().join("a.safetensors"), 0..3, 2);
    assert!(refused(true).contains("image_latents"), "{}", refused(true));
    write_shard(&folder.path().join("b.safetensors"), 0..3, 4);
    let message = refused(false);
    assert!(
        message.contains("b.safetensors") && message.contains("[4, 3, 2, 2]"),
        "{message}"
    );
    std::fs::write(folder.path().join("b.safetensors"), b"short")?;
    assert!(refused(false).contains("b.safetensors"));
    Ok(())
}

#[test]
fn a_contact_sheet_has_a_row_for_each_video_and_a_picture_for_each_frame() -> Result<()> {
    let draw = Draw {
        seed: 0,
        step: 0,
        sample: 0,
    };
    let latents = normal_noise(draw, (2, 3, 4, 5, 6), &Device::Cpu)?;
    let sheet = contact_sheet(&latents)?;
    let decoder = png::Decoder::new(std::io::Cursor::new(&sheet));
    let mut reader = decoder.read_info()?;
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels)?;
    assert_eq!((info.width, info.height), (2 + 3 * (6 * 4 + 2), 2 + 2 * (5 * 4 + 2)));
    let pixel = |x: usize, y: usize| &pixels[(y * info.width as usize + x) * 3..][..3];
    // Margins are black; each element is a square of one colour.
    assert_eq!(pixel(0, 0), [0, 0, 0]);
    assert_eq!(pixel(2, 2), pixel(5, 5));
    assert_ne!(pixel(2, 2), pixel(6, 2));
    assert_eq!(contact_sheet(&latents)?, sheet);
    Ok(())
}
