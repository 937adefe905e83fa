//! Types that describe architectures: the tensors that llama.cpp asks for, and the keys that it reads.
//!
//! The descriptions themselves are in [`super::arch_table`]; source: llama.cpp `src/models/*.cpp`,
//! `load_arch_hparams` and `load_arch_tensors`.

/// A length that depends on the model's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dim {
    Embd,
    Vocab,
    Heads,
    HeadWidth,
    /// All query heads.
    Q,
    /// All key (or value) heads.
    Kv,
    /// Queries, keys and values side by side.
    Qkv,
    Experts,
    /// `n_ff` of one expert.
    FfExpert,
    /// Gate and up of one expert, fused.
    FfGateUp,
    /// `n_ff` of a dense layer.
    FfDense,
    /// `n_ff` of all shared experts.
    FfShared,
    /// Rank of the compressed queries (multi-head latent attention).
    LoraQ,
    LoraKv,
    /// Compressed keys and values with the rotated part: `kv_lora_rank + rope`.
    LatentKv,
    Rope,
    /// All query heads, each with its plain and rotated part.
    MlaQ,
    /// One query head, plain and rotated part.
    MlaHead,
    /// Plain part of one head; also its value width.
    MlaPlain,
    MlaV,
    /// A layer's part of the embeddings per layer; tensors with it occur only where it is not 0.
    PerLayer,
    /// The embeddings per layer of all layers.
    AllPerLayer,
    /// Experts divided into pairs (`chexps` of Grove MoE).
    ChunkExperts,
    /// A length that every model has.
    Exactly(u32),
    /// A multiple of another length.
    Times(u32, &'static Dim),
    KvHeads,
    /// Input and output of an expert: the latent width, or `Embd`.
    ExpertEmbd,
    /// Inner width of Mamba, of which `granitehybrid` and `jamba` want twice the embedding.
    SsmInner,
    SsmHeads,
    /// Width of Mamba 2's convolution: its input, and two states per group.
    SsmConv,
    /// Everything that Mamba 2 projects its layer's input to.
    SsmIn,
    Used,
    /// Sizes of [`super::Qwen4Exp`]: heads of keys and values of a recurrent state, and their width.
    StateKeys,
    StateValues,
    StateWidth,
    /// All of a state's values.
    StateInner,
    /// A state's queries, keys and values side by side.
    StateConv,
    /// Rotated numbers of a head.
    Rotated,
    StreamRank,
    IndexHeads,
    IndexBudget,
    /// Length of the longest n-gram.
    NGram,
    /// Heads of the table of n-grams for each length.
    NGramHeads,
    NGramWidth,
    /// Rows of all heads.
    NGramRows,
}

/// The role of a tensor, which decides its type and the spread of its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Scale of a normalisation: F32 around 1.
    Norm,
    /// Added vector: F32 around 0, small.
    Bias,
    /// Token embeddings, spread 1.
    Embedding,
    /// Table of hashed n-grams, spread 1.
    NGrams,
    Output,
    /// Matrix whose output keeps the spread of its input.
    Matrix,
    /// As `Matrix`, but F32.
    SmallMatrix,
    /// Matrix that writes to the residual stream.
    Residual,
    /// Router: F32, spread so that experts differ clearly.
    Router,
    ExpertIn,
    ExpertDown,
    /// Rate of a recurrent state's decay: F32 around -1, below 0.
    Decay,
    /// Bias of a time step: F32 around -3, so that a recurrent state remembers some ten tokens.
    TimeStep,
    /// Numbers of different experts in each row.
    Routes,
}

/// The layers in which a tensor occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    Model,
    Layer,
    /// In all layers, when there are embeddings per layer.
    LayerInput,
    Moe,
    /// In layers with experts, when gate and up are separate.
    MoeSplit,
    /// In layers with experts, when gate and up are fused.
    MoeFused,
    /// In layers with experts, when there are shared experts.
    MoeShared,
    /// In layers with experts, when per-expert scales are asked for.
    MoeScaled,
    /// As `MoeScaled`, when gate and up are separate.
    MoeScaledSplit,
    Dense,
    /// In layers with attention, of architectures that have others; also in those of multi-token prediction.
    FullAttention,
    /// In layers with a recurrent state.
    Recurrent,
    /// In layers whose experts see a projection of the layer's input.
    MoeLatent,
    /// In layers with experts, when they are among the first n.
    MoeFirst(u32),
    /// In layers with experts, when they come after the first n.
    MoeAfter(u32),
    /// In layers for which `layer % of == at`.
    Every {
        of: u32,
        at: u32,
    },
    /// In layers of multi-token prediction, which have the tensors of ordinary layers, too.
    Mtp,
}

/// Groups and state of Mamba 2.
pub(super) const SSM_GROUPS: u32 = 2;
pub(super) const SSM_STATE: u32 = 128;

/// How the layers mix tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mixing {
    Attention,
    /// Attention in every n-th layer, a recurrent state in the others.
    AttentionEvery(u32),
    /// Layers that are one thing only, in turn: a recurrent state, experts, attention, experts.
    InTurn,
}

impl Mixing {
    pub(super) fn period(self) -> u32 {
        match self {
            Self::Attention => 1,
            Self::AttentionEvery(n) => n,
            Self::InTurn => 4,
        }
    }

    pub(super) fn is_attention(self, layer: u32) -> bool {
        match self {
            Self::Attention => true,
            Self::AttentionEvery(n) => (layer + 1).is_multiple_of(n),
            Self::InTurn => layer % 4 == 2,
        }
    }

    pub(super) fn is_recurrent(self, layer: u32) -> bool {
        match self {
            Self::Attention => false,
            Self::AttentionEvery(n) => !(layer + 1).is_multiple_of(n),
            Self::InTurn => layer.is_multiple_of(4),
        }
    }
}

/// One tensor (or one per layer).
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// Name; `blk.<layer>.` is put before it in all scopes but [`Scope::Model`].
    pub name: &'static str,
    pub dims: &'static [Dim],
    pub role: Role,
    pub scope: Scope,
}

pub(super) const fn row(scope: Scope, name: &'static str, dims: &'static [Dim], role: Role) -> Row {
    Row { name, dims, role, scope }
}

/// A key's value.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeyValue {
    Int(u32),
    Float(f32),
    Bool(bool),
    Size(Dim),
    /// One flag per layer: sliding window, except for every n-th layer.
    WindowExceptEvery(u32),
    /// Four numbers (`rope.dimension_sections`): the rotated half in three parts, then 0.
    RopeSections,
    /// One length per layer, 0 outside of these layers.
    InLayers(Scope, Dim),
    /// One number per layer, in turn, and that of layers for multi-token prediction.
    Turns(&'static [u32], u32),
    /// As `Turns`, without the layers of multi-token prediction.
    MainTurns(&'static [u32]),
    /// Numbers of 32 bits.
    List(&'static [u32]),
    /// First row of each head of the table of n-grams.
    NGramOffsets,
    /// Rows of each of these heads.
    NGramSizes,
    /// Factors of the tokens of an n-gram in its hash.
    NGramFactors,
}

/// `<architecture>.<key>`.
pub(super) type Key = (&'static str, KeyValue);

/// Numbers of shared experts: minimum, default, maximum.
pub(super) type Shared = (u32, u32, u32);
pub(super) const NEVER: Shared = (0, 0, 0);
pub(super) const OPTIONAL: Shared = (0, 0, 64);
pub(super) const USUALLY_ONE: Shared = (0, 1, 64);
pub(super) const ONE: Shared = (1, 1, 1);
pub(super) const AT_LEAST_ONE: Shared = (1, 1, 64);

/// An architecture with experts, as llama.cpp knows it.
#[derive(Debug)]
pub(super) struct Arch {
    /// `general.architecture`.
    pub name: &'static str,
    /// Groups of tensors, in the order of the file.
    pub tensors: &'static [&'static [Row]],
    /// Keys beyond those that every architecture gets.
    pub keys: &'static [Key],
    /// Keys of the recurrent layers.
    pub state_keys: &'static [Key],
    pub shared: Shared,
    /// Leading layers without experts; `None` if the architecture has no such layers.
    pub dense_lead: Option<u32>,
    /// Whether layers for multi-token prediction have no experts.
    pub mtp_dense: bool,
    /// Whether experts may be limited to every n-th layer.
    pub interleaved: bool,
    /// Whether llama.cpp reads `ffn_gate_up_exps`.
    pub fused: bool,
    /// Whether every head needs its own keys and values.
    pub multi_head: bool,
    /// Whether `feed_forward_length` is the experts' width.
    pub ff_is_expert: bool,
    /// Default gate of the router: llama.cpp's `expert_gating_func`; 0 omits the key.
    pub gating: u32,
    pub mixing: Mixing,
    /// Key of the width of the experts' input, if that may be a projection of what the router sees.
    pub latent: Option<&'static str>,
}

impl Arch {
    /// The base from which the table's entries differ.
    pub(super) const PLAIN: Arch = Arch {
        name: "",
        tensors: &[],
        keys: &[],
        state_keys: &[],
        shared: NEVER,
        dense_lead: None,
        mtp_dense: false,
        interleaved: false,
        fused: false,
        multi_head: false,
        ff_is_expert: false,
        gating: 0,
        mixing: Mixing::Attention,
        latent: None,
    };
}
