//! A picture of sampled latents: what can be seen of them without the video decoder.

use anyhow::{Context as _, Result, ensure};
use candle_core::{DType, Tensor};

/// Pixels of the sheet for one element of the latents.
const SCALE: usize = 4;
/// Pixels between pictures.
const MARGIN: usize = 2;

/// Draws latents [videos, frames, channels, height, width] as a PNG file: a row for each video, a picture for each frame, whose
/// red, green and blue are the first three channels (one channel is grey). Every channel of a video has its own range, from two
/// standard deviations below its mean to two above.
///
/// # Errors
/// If the latents have another number of dimensions or are empty.
pub fn contact_sheet(latents: &Tensor) -> Result<Vec<u8>> {
    let (videos, frames, channels, height, width) = latents.dims5()?;
    ensure!(
        latents.elem_count() > 0,
        "there are no latents to draw: {:?}",
        latents.dims()
    );
    let (column, row) = (width * SCALE + MARGIN, height * SCALE + MARGIN);
    let (sheet_width, sheet_height) = (frames * column + MARGIN, videos * row + MARGIN);
    let mut pixels = vec![0u8; sheet_width * sheet_height * 3];
    let numbers = latents.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let plane = height * width;
    for video in 0..videos {
        let values = &numbers[video * frames * channels * plane..][..frames * channels * plane];
        for colour in 0..3 {
            let channel = colour.min(channels - 1);
            let of_frame = |frame: usize| &values[(frame * channels + channel) * plane..][..plane];
            let all = Vec::from_iter((0..frames).flat_map(of_frame).copied());
            let to_byte = range_of(&all);
            for frame in 0..frames {
                let (left, top) = (MARGIN + frame * column, MARGIN + video * row);
                for (place, &value) in of_frame(frame).iter().enumerate() {
                    let (x, y) = (left + place % width * SCALE, top + place / width * SCALE);
                    for dot in 0..SCALE * SCALE {
                        let pixel = (y + dot / SCALE) * sheet_width + x + dot % SCALE;
                        pixels[pixel * 3 + colour] = to_byte(value);
                    }
                }
            }
        }
    }
    encode(&pixels, sheet_width, sheet_height).context("writing a contact sheet")
}

/// Returns how a value becomes a byte, given all values of its kind.
fn range_of(values: &[f32]) -> impl Fn(f32) -> u8 + use<> {
    let count = values.len() as f32;
    let mean = values.iter().sum::<f32>() / count;
    let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count).sqrt();
    // What is the same everywhere is grey. Numbers that are none become black: `as` saturates.
    let scale = if deviation > 0.0 {
        255.0 / (4.0 * deviation)
    } else {
        0.0
    };
    move |value| (127.5 + (value - mean) * scale).round() as u8
}

fn encode(pixels: &[u8], width: usize, height: usize) -> Result<Vec<u8>> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width.try_into()?, height.try_into()?);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(pixels)?;
    Ok(file)
}
