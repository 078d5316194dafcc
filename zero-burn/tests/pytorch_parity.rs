//! Training equals PyTorch's: losses, gradient norms and final weights of the recorded runs, at every stage and world
//! size.

#[path = "common/recording.rs"]
mod recording;

use std::sync::Arc;

use burn::tensor::Device;
use recording::{BF16, F16, Recording, SAME_TYPE};
use zero_burn::{Communicator, DType, Precision, Stage, WorldSize, ZeroConfig, ZeroError};

fn on_the_cpu(_: &Arc<dyn Communicator>) -> Result<Device, ZeroError> {
    Ok(Device::flex())
}

#[test]
fn an_untied_gpt_trains_as_in_pytorch() {
    parity("gpt");
}

#[test]
fn a_tied_gpt_trains_as_in_pytorch() {
    parity("gpt_tied");
}

fn parity(name: &str) {
    let recording = Recording::read(name);
    for stage in Stage::ALL {
        for world in [1, 2, 4, 8] {
            // Once with every parameter gathered on demand, once with the small ones kept.
            for persistence_threshold in if stage == Stage::Three { vec![0, 200] } else { vec![0] } {
                let config = ZeroConfig { stage, persistence_threshold, ..ZeroConfig::default() };
                recording.replay(&config, WorldSize::new(world).unwrap(), &SAME_TYPE, &on_the_cpu);
            }
        }
    }
}

#[test]
fn training_in_sixteen_bits_follows_pytorch_in_thirty_two() {
    for recording in ["gpt", "gpt_tied"].map(Recording::read) {
        for (compute, bounds) in [(DType::F16, F16), (DType::BF16, BF16)] {
            for (stage, world) in Stage::ALL.into_iter().flat_map(|stage| [1, 2].map(|world| (stage, world)))
            {
                let precision = Precision { compute, ..Precision::default() };
                let config = ZeroConfig { stage, precision, ..ZeroConfig::default() };
                recording.replay(&config, WorldSize::new(world).unwrap(), &bounds, &on_the_cpu);
            }
        }
    }
}
