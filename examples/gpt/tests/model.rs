//! The model by itself.

use burn::module::Module as _;
use burn::tensor::{Device, Int, Tensor};
use gpt::GptConfig;

#[test]
fn the_number_of_parameters_is_that_of_the_module() {
    for tied in [false, true] {
        for layers in [1, 3] {
            let config = GptConfig { vocab: 40, context: 9, dim: 12, heads: 3, layers, tied };
            assert_eq!(config.parameters(), config.init(&Device::default()).num_params() as u128);
        }
    }
    let huge = GptConfig { dim: usize::MAX, layers: usize::MAX, ..GptConfig::default() };
    assert!(huge.parameters() > 1 << 90);
}

#[test]
fn a_token_sees_only_what_is_before_it() {
    let device = Device::default();
    let config = GptConfig { vocab: 256, context: 6, dim: 16, heads: 2, layers: 2, tied: false };
    let model = config.init(&device);
    let logits = |last: i32| {
        let tokens = Tensor::<1, Int>::from_ints([1, 2, 3, 4, last], &device).unsqueeze::<2>();
        model.forward(tokens).slice(0..4).into_data().iter::<f32>().collect::<Vec<_>>()
    };
    assert_eq!(logits(5), logits(6));
}
