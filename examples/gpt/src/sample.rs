//! Text from a trained model.

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng};

use crate::model::{Gpt, GptConfig};

/// Below 1, the likelier bytes gain.
const TEMPERATURE: f32 = 0.8;

/// Continues `prompt` by `length` bytes, one at a time; an empty prompt stands for a line break.
pub fn generate(
    model: &Gpt,
    config: &GptConfig,
    prompt: &[u8],
    length: usize,
    seed: u64,
    device: &Device,
) -> String {
    let device = device.clone().inner();
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut text = if prompt.is_empty() { vec![b'\n'] } else { prompt.to_vec() };
    for _ in 0..length {
        let window = &text[text.len().saturating_sub(config.context)..];
        let tokens: Vec<i32> = window.iter().map(|&byte| i32::from(byte)).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [1, window.len()]), &device);
        let logits = model.forward(tokens).slice(window.len() - 1..window.len());
        text.push(draw(&logits.into_data().iter::<f32>().collect::<Vec<_>>(), &mut rng));
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// A text as a terminal may show it: line breaks stay, other control characters are escaped.
pub fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' => shown.push('\n'),
            control if control.is_control() => shown.extend(control.escape_debug()),
            other => shown.push(other),
        }
    }
    shown
}

fn draw(logits: &[f32], rng: &mut SmallRng) -> u8 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = logits.iter().map(|logit| ((logit - largest) / TEMPERATURE).exp()).collect();
    let mut rest = rng.random::<f32>() * weights.iter().sum::<f32>();
    let drawn = weights.iter().position(|weight| {
        rest -= weight;
        rest <= 0.0
    });
    // Rounding may leave a little over: that is the last byte's.
    drawn.unwrap_or(logits.len() - 1) as u8
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn only_control_characters_are_escaped_and_line_breaks_are_none() {
        let plain = "let text = \"a\\nb\";\n\u{fffd} it's é\n";
        assert_eq!(shown(plain), plain);
        assert_eq!(shown("\u{1b}[2J\t\r\0\u{9b}"), "\\u{1b}[2J\\t\\r\\0\\u{9b}");
    }
}
