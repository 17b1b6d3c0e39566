//! Models of the Llama family as shapes: what their configuration says of parameters, and what their layers keep.

use super::activations::{Activations, PartActivations};
use super::model_shape::{ShapedParameter, flag, optional_size, size};
use super::workload::{ComputeDevice, Workload};
use crate::nn::loss_block_rows;
use serde_json::{Map, Value};

/// The sizes of a model of the Llama family, with transformers' names and defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlamaShape {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Longest sequence for which rotary positions are prepared.
    pub max_position_embeddings: usize,
    /// Whether the output projection is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have biases.
    pub query_bias: bool,
    /// Whether the attention's output projection has one.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normed by head, as in Qwen 3.
    pub query_norm: bool,
}

impl LlamaShape {
    pub(super) fn read(kind: &str, object: &Map<String, Value>) -> Result<Self, String> {
        let (hidden_size, heads) = (size(object, "hidden_size")?, size(object, "num_attention_heads")?);
        let head_dim = match optional_size(object, "head_dim")? {
            Some(head_dim) => head_dim,
            None if kind == "qwen3" => 128,
            None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                return Err(format!(
                    "`hidden_size` is {hidden_size} and `num_attention_heads` is {heads}, expected the first to be a multiple \
                     of the second where `head_dim` is not given"
                ));
            }
        };
        let key_value_heads = optional_size(object, "num_key_value_heads")?;
        let attention_bias = flag(object, "attention_bias", kind == "qwen2")?;
        let shape = Self {
            vocab_size: size(object, "vocab_size")?,
            hidden_size,
            intermediate_size: size(object, "intermediate_size")?,
            num_hidden_layers: size(object, "num_hidden_layers")?,
            num_attention_heads: heads,
            // Where Mistral says nothing it is 8.
            num_key_value_heads: key_value_heads.unwrap_or(if kind == "mistral" { 8 } else { heads }),
            head_dim,
            max_position_embeddings: optional_size(object, "max_position_embeddings")?.unwrap_or(2048),
            tie_word_embeddings: flag(object, "tie_word_embeddings", false)?,
            query_bias: attention_bias,
            output_bias: attention_bias && kind != "qwen2",
            mlp_bias: flag(object, "mlp_bias", false)?,
            query_norm: kind == "qwen3",
        };
        if !heads.is_multiple_of(shape.num_key_value_heads) {
            return Err(format!(
                "`num_attention_heads` is {heads} and `num_key_value_heads` is {}, expected the first to be a multiple of the \
                 second",
                shape.num_key_value_heads
            ));
        }
        Ok(shape)
    }

    fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    fn key_value_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Returns the parameters in the order in which our model creates them: the table, the layers and the output projection are
    /// units, the last norm lies in none.
    pub(super) fn parameters(&self) -> Vec<ShapedParameter> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (queries, keys) = (self.query_width(), self.key_value_width());
        let last = self.num_hidden_layers + 1;
        let mut parameters = Vec::new();
        let mut add = |name: String, shape: Vec<usize>, units: Vec<usize>| {
            parameters.push(ShapedParameter { name, shape, units });
        };
        let table_units = if self.tie_word_embeddings {
            vec![0, last]
        } else {
            vec![0]
        };
        add(
            "model.embed_tokens.weight".into(),
            vec![self.vocab_size, hidden],
            table_units,
        );
        for layer in 0..self.num_hidden_layers {
            let mut add = |name: &str, shape: Vec<usize>| {
                add(format!("model.layers.{layer}.{name}"), shape, vec![layer + 1]);
            };
            let linear = |add: &mut dyn FnMut(&str, Vec<usize>), name: &str, rows, columns, bias| {
                add(&format!("{name}.weight"), vec![rows, columns]);
                if bias {
                    add(&format!("{name}.bias"), vec![rows]);
                }
            };
            add("input_layernorm.weight", vec![hidden]);
            linear(&mut add, "self_attn.q_proj", queries, hidden, self.query_bias);
            linear(&mut add, "self_attn.k_proj", keys, hidden, self.query_bias);
            linear(&mut add, "self_attn.v_proj", keys, hidden, self.query_bias);
            linear(&mut add, "self_attn.o_proj", hidden, queries, self.output_bias);
            if self.query_norm {
                add("self_attn.q_norm.weight", vec![self.head_dim]);
                add("self_attn.k_norm.weight", vec![self.head_dim]);
            }
            add("post_attention_layernorm.weight", vec![hidden]);
            linear(&mut add, "mlp.gate_proj", inner, hidden, self.mlp_bias);
            linear(&mut add, "mlp.up_proj", inner, hidden, self.mlp_bias);
            linear(&mut add, "mlp.down_proj", hidden, inner, self.mlp_bias);
        }
        add("model.norm.weight".into(), vec![hidden], Vec::new());
        if !self.tie_word_embeddings {
            add("lm_head.weight".into(), vec![self.vocab_size, hidden], vec![last]);
        }
        parameters
    }

    /// Returns the sequence that is estimated where none is said.
    pub(super) fn default_sequence(&self) -> usize {
        self.max_position_embeddings.min(2048)
    }

    /// Counts what a forward keeps and a backward needs, in the layers of [`nn`](crate::nn), op by op.
    ///
    /// Every op's result stays until the backward has ended, since candle's graph has it. Of a backward counts the op that
    /// needs most: candle adds every gradient into a new tensor of zeros, so that three of one size are there; on a GPU it keeps
    /// those three of a product's while they go through the transpose of its weight, where two more come. Products of 16 bits
    /// are computed in f32 on the CPU. There the output projection and the loss are one op without logits, which has its gradients
    /// in f32 from the forward on.
    pub(super) fn activations(&self, workload: &Workload, sequence: usize) -> Activations {
        let tokens = (workload.batch * sequence) as u64;
        let bytes = workload.dtype().size_in_bytes() as u64;
        let on_gpu = workload.computes_on == ComputeDevice::Cuda;
        let [hidden, inner, vocabulary] =
            [self.hidden_size, self.intermediate_size, self.vocab_size].map(|width| tokens * width as u64 * bytes);
        let (queries, keys) = (
            tokens * self.query_width() as u64 * bytes,
            tokens * self.key_value_width() as u64 * bytes,
        );
        let heads = tokens * self.num_attention_heads as u64;
        let biases = |has: bool, widths: u64| if has { widths } else { 0 };

        // Norm, projection, sum; norm, projection, sum.
        let mut kept = 6 * hidden;
        // As projected, turned by position; attended, and put together again.
        kept += 4 * queries + 3 * keys;
        // Two statistics of each row of scores.
        kept += heads * 8;
        // Gate, the other, their product.
        kept += 3 * inner;
        kept += biases(self.query_bias, queries + 2 * keys) + biases(self.output_bias, hidden);
        kept += biases(self.mlp_bias, 2 * inner + hidden) + biases(self.query_norm, 2 * (queries + keys));
        if on_gpu {
            // Compositions of candle ops in f32: scores four times and in the layer's type, and what lies between.
            kept += heads * sequence as u64 * (4 * 4 + bytes);
            let in_f32 = |size: u64, times: u64| size / bytes * 4 * times;
            kept += in_f32(hidden, 6) + in_f32(queries + keys, 4) + in_f32(inner, 4) + 2 * queries;
        }
        let weight = |rows: usize, columns: usize| (rows * columns) as u64 * bytes;
        let attention = tokens * self.query_width() as u64 * 4;
        // Of a product's weight: gradient, zeros and sum, or with 16 bits both factors and the result in f32.
        let of_weight = |rows: usize, columns: usize| {
            let in_f32 = 4 * (tokens * (rows + columns) as u64 + (rows * columns) as u64);
            let while_multiplied = if bytes == 2 && !on_gpu {
                in_f32 + weight(rows, columns)
            } else {
                0
            };
            while_multiplied.max(if on_gpu { 5 } else { 3 } * weight(rows, columns))
        };
        let of_mlp_weight = of_weight(self.intermediate_size, self.hidden_size);
        let backward = [
            // Gate and up: the gradients of both, that of their input, and the weight's.
            2 * inner + 5 * hidden + of_mlp_weight,
            2 * hidden + 3 * inner + of_mlp_weight,
            // Their product: its gradient, those of both, and one with its zeros.
            5 * inner + 2 * hidden,
            // Of keys and values in f32, by query head.
            4 * queries + 2 * attention + 2 * keys + hidden,
            3 * queries + 2 * hidden + of_weight(self.query_width(), self.hidden_size),
        ];
        let layer = PartActivations {
            count: self.num_hidden_layers,
            input: hidden,
            output: hidden,
            kept,
            backward: backward.into_iter().max().unwrap_or(0),
        };
        let table = weight(self.vocab_size, self.hidden_size);
        let embedding = PartActivations {
            count: 1,
            input: 0,
            output: hidden,
            kept: hidden,
            backward: hidden + 3 * table,
        };
        let (projection, loss) = if on_gpu {
            let projection = PartActivations {
                count: 1,
                input: hidden,
                output: vocabulary,
                kept: vocabulary,
                backward: vocabulary + 3 * hidden + of_weight(self.vocab_size, self.hidden_size),
            };
            // Of the whole vocabulary's gradient, three at once.
            (projection, 4 * tokens * self.vocab_size as u64 * 2)
        } else {
            let in_f32 = |size: u64| size / bytes * 4;
            // The logits of a block of rows, what they are made of, and the table, if it has to be widened.
            let rows = loss_block_rows(self.vocab_size).min(tokens as usize) as u64;
            let block = 4 * rows * (self.vocab_size + 2 * self.hidden_size) as u64;
            let widened = if bytes < 4 { in_f32(table) } else { 0 };
            let copies = if bytes < 4 { 3 } else { 2 };
            let projection = PartActivations {
                count: 1,
                input: hidden,
                output: 4,
                kept: in_f32(hidden) + in_f32(table),
                backward: (block + widened).max(copies * (hidden + table)),
            };
            (projection, 0)
        };
        Activations {
            parts: vec![embedding, layer, projection],
            outside: hidden + loss,
            outside_backward: if on_gpu { 3 * vocabulary + loss } else { 3 * hidden },
            // Sines and cosines, f32.
            constants: (self.max_position_embeddings * self.head_dim) as u64 * 4,
        }
    }
}
