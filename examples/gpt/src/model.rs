//! A GPT over bytes: pre-norm blocks, learned positions, erf GELU, biases everywhere but in the head.
//!
//! Plain Burn but for [`recompute`]. Nothing here knows that the parameters may be sharded.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, log_softmax, softmax};
use burn::tensor::{Bool, Device, FloatDType, Int, Tensor};
use serde::{Deserialize, Serialize};
use zero_burn::recompute;

/// The shape of a [`Gpt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GptConfig {
    /// Distinct tokens; 256 for bytes.
    pub vocab: usize,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// Width of the residual stream; a multiple of `heads`.
    pub dim: usize,
    /// Attention heads per block.
    pub heads: usize,
    /// Blocks.
    pub layers: usize,
    /// Whether the head is the transposed token table.
    pub tied: bool,
}

impl Default for GptConfig {
    /// About five million parameters.
    fn default() -> Self {
        Self { vocab: 256, context: 128, dim: 256, heads: 8, layers: 6, tied: false }
    }
}

impl GptConfig {
    /// Parameters of the model; sizes beyond 2^32 count as that.
    pub fn parameters(&self) -> u128 {
        let size = |size: usize| size.min(u32::MAX as usize) as u128;
        let [vocab, context, dim, layers] = [self.vocab, self.context, self.dim, self.layers].map(size);
        // Weights and biases of qkv, proj, fc1 and fc2, and two norms.
        let block = 12 * dim * dim + 13 * dim;
        let tables = vocab * dim * if self.tied { 1 } else { 2 } + context * dim;
        tables + layers * block + 2 * dim
    }

    /// The model on `device`; parameters are drawn when they are first used.
    pub fn init(&self, device: &Device) -> Gpt {
        let normal = Initializer::Normal { mean: 0.0, std: 0.02 };
        let linear = |input, output| LinearConfig::new(input, output).with_initializer(normal.clone());
        let table = |rows| EmbeddingConfig::new(rows, self.dim).with_initializer(normal.clone()).init(device);
        let norm = || LayerNormConfig::new(self.dim).with_epsilon(1e-5).init(device);
        Gpt {
            wte: table(self.vocab),
            wpe: table(self.context),
            blocks: (0..self.layers)
                .map(|_| Block {
                    ln1: norm(),
                    qkv: linear(self.dim, 3 * self.dim).init(device),
                    proj: linear(self.dim, self.dim).init(device),
                    ln2: norm(),
                    fc1: linear(self.dim, 4 * self.dim).init(device),
                    fc2: linear(4 * self.dim, self.dim).init(device),
                    heads: self.heads,
                })
                .collect(),
            lnf: norm(),
            head: (!self.tied).then(|| linear(self.dim, self.vocab).with_bias(false).init(device)),
            recompute: false,
        }
    }
}

/// A decoder-only transformer.
#[derive(Module, Debug)]
pub struct Gpt {
    /// Token table, `[vocab, dim]`.
    pub wte: Embedding,
    /// Position table, `[context, dim]`.
    pub wpe: Embedding,
    /// The blocks, in order.
    pub blocks: Vec<Block>,
    /// The last norm.
    pub lnf: LayerNorm,
    /// From the residual stream to logits; the transposed token table where absent.
    pub head: Option<Linear>,
    recompute: bool,
}

/// One block: attention, then a feed-forward of four times the width.
#[derive(Module, Debug)]
pub struct Block {
    /// Before attention.
    pub ln1: LayerNorm,
    /// Queries, keys and values in one product.
    pub qkv: Linear,
    /// Out of attention.
    pub proj: Linear,
    /// Before the feed-forward.
    pub ln2: LayerNorm,
    /// Into the feed-forward.
    pub fc1: Linear,
    /// Out of it.
    pub fc2: Linear,
    heads: usize,
}

impl Gpt {
    /// The same model, whose activations in blocks are kept from forward to backward, or computed again in backward.
    #[must_use]
    pub fn with_recompute(self, recompute: bool) -> Self {
        Self { recompute, ..self }
    }

    /// Logits `[batch * sequence, vocab]` for tokens `[batch, sequence]`.
    ///
    /// # Panics
    ///
    /// If the sequence is longer than the context.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [batch, sequence] = tokens.dims();
        // `select` lets the tables go at once; Burn's `embedding` would keep them until backward.
        let tokens = self.wte.weight.val().select(0, tokens.reshape([batch * sequence]));
        let [_, dim] = tokens.dims();
        let positions = self.wpe.weight.val().slice(0..sequence).unsqueeze::<3>();
        let mut x = tokens.reshape([batch, sequence, dim]) + positions;
        for block in &self.blocks {
            x = if self.recompute { recompute(block, x, Block::forward) } else { block.forward(x) };
        }
        let x = self.lnf.forward(x).reshape([batch * sequence, dim]);
        match &self.head {
            Some(head) => head.forward(x),
            // The table on the left, as it is stored: without gradient checkpointing, the tape would keep a transposed
            // view of it alive until backward.
            None => self.wte.weight.val().matmul(x.transpose()).transpose(),
        }
    }

    /// Mean cross-entropy, in nats per token, of predicting `targets` from `tokens`, both `[batch, sequence]`.
    ///
    /// # Panics
    ///
    /// If the sequence is longer than the context.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let [batch, sequence] = targets.dims();
        let targets = targets.reshape([batch * sequence, 1]);
        // Logits of 16 bits are too coarse for the logarithm of a sum of exponentials.
        let logits = self.forward(tokens).cast(FloatDType::F32);
        log_softmax(logits, 1).gather(1, targets).mean().neg()
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attention(self.ln1.forward(x));
        x.clone() + self.fc2.forward(gelu(self.fc1.forward(self.ln2.forward(x))))
    }

    fn attention(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, sequence, dim] = x.dims();
        let width = dim / self.heads;
        let qkv = self.qkv.forward(x);
        let part = |index: usize| {
            let columns = index * dim..(index + 1) * dim;
            qkv.clone()
                .slice([0..batch, 0..sequence, columns])
                .reshape([batch, sequence, self.heads, width])
                .swap_dims(1, 2)
        };
        let (q, k, v) = (part(0) * (width as f64).powf(-0.5), part(1), part(2));
        let scores = q.matmul(k.swap_dims(2, 3));
        let future = Tensor::<2, Bool>::tril_mask([sequence, sequence], 0, &scores.device()).unsqueeze::<4>();
        let weights = softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3);
        let mixed = weights.matmul(v).swap_dims(1, 2).reshape([batch, sequence, dim]);
        self.proj.forward(mixed)
    }
}
