use super::*;

/// Nodes as llama.cpp makes them for tokens with two experts each, `[n, 2, n_tokens]`.
#[derive(Default)]
struct Nodes {
    #[allow(clippy::vec_box)]
    all: Vec<Box<ggml_tensor>>,
    products: Vec<(*mut ggml_tensor, SliceKind)>,
    /// 0 means 1.
    n_tokens: usize,
}

impl Nodes {
    fn tensor(&mut self, op: llama::ggml_op, ne: [i64; 2], sources: &[*mut ggml_tensor]) -> *mut ggml_tensor {
        let ne = [ne[0], ne[1], self.n_tokens.max(1) as i64, 1];
        let mut node = plain_tensor(llama::GGML_TYPE_F32, ne, std::ptr::null_mut(), &unused());
        node.op = op;
        node.src[..sources.len()].copy_from_slice(sources);
        self.all.push(Box::new(node));
        &raw mut **self.all.last_mut().unwrap()
    }

    fn leaf(&mut self, ne: [i64; 2]) -> *mut ggml_tensor {
        self.tensor(llama::GGML_OP_NONE, ne, &[])
    }

    fn product(&mut self, kind: SliceKind, n: i64, input: *mut ggml_tensor, ids: *mut ggml_tensor) -> *mut ggml_tensor {
        let weights = self.leaf([1, 1]);
        let node = self.tensor(llama::GGML_OP_MUL_MAT_ID, [n, 2], &[weights, input, ids]);
        self.products.push((node, kind));
        node
    }

    fn view(&mut self, of: *mut ggml_tensor, op: llama::ggml_op, n: i64, offset: usize) -> *mut ggml_tensor {
        let view = self.tensor(op, [n, 2], &[of]);
        // SAFETY: both are of these nodes.
        unsafe {
            (*view).nb = (*of).nb;
            (*view).view_src = root(of);
            (*view).view_offs = (*of).view_offs + offset * size_of::<f32>();
        }
        view
    }

    fn chain(&self, nodes: &[*mut ggml_tensor]) -> Option<Chain> {
        let kind_of = |node| self.products.iter().find(|(product, _)| *product == node).map(|(_, kind)| *kind);
        let all: Vec<ggml_tensor> = self.all.iter().map(|node| **node).collect();
        let n_uses = |tensor| Some(all.iter().flat_map(|node| node.src).filter(|&source| source == tensor).count());
        // SAFETY: the nodes are live as long as `self`.
        unsafe { Chain::of(nodes, [2, self.n_tokens.max(1)], kind_of, n_uses) }
    }
}

fn unused() -> ggml_tensor {
    // SAFETY: all-zero is a valid `ggml_tensor`.
    unsafe { std::mem::zeroed() }
}

fn rows(chain: &Chain, link: usize, source: usize) -> (usize, usize, usize) {
    let Operand::Rows { first, stride, len } = chain.links[link].operands[source] else { panic!("rows") };
    (first, stride, len)
}

#[test]
fn gate_up_and_down_with_biases_are_one_chain() {
    let mut nodes = Nodes::default();
    let (x, ids, bias) = (nodes.leaf([8, 1]), nodes.leaf([2, 1]), nodes.leaf([4, 16]));
    let up = nodes.product(SliceKind::Up, 4, x, ids);
    let gate = nodes.product(SliceKind::Gate, 4, x, ids);
    let biased = nodes.tensor(llama::GGML_OP_ADD_ID, [4, 2], &[gate, bias, ids]);
    let glu = nodes.tensor(llama::GGML_OP_GLU, [4, 2], &[biased, up]);
    let down = nodes.product(SliceKind::Down, 8, glu, ids);
    let weights = nodes.leaf([1, 2]);
    let weighted = nodes.tensor(llama::GGML_OP_MUL, [8, 2], &[down, weights]);
    let all = [up, gate, biased, glu, down, weighted];
    let chain = nodes.chain(&all).expect("every node is row by row");
    assert_eq!(chain.n_nodes, 5, "what comes after the last product is not part of it");
    assert_eq!(chain.inputs.len(), 1, "both products multiply one copy");
    // One shared row of 8, then two rows of 4 for each of four links, and two of 8.
    assert_eq!((chain.n_floats, chain.links[4].start), (8 + 4 * 8 + 16, 8 + 4 * 8));
    assert_eq!(rows(&chain, 3, 0), (24, 4, 4));
    assert_eq!(rows(&chain, 3, 1), (8, 4, 4));
    // A node of another split would lack the intermediate result that it reads, and so would one that reads a view.
    let view = nodes.view(glu, llama::GGML_OP_VIEW, 2, 0);
    let with_view = [up, gate, biased, glu, view, down];
    assert!(nodes.chain(&all).is_none() && nodes.chain(&with_view).is_some());
    nodes.tensor(llama::GGML_OP_SQR, [2, 2], &[view]);
    assert!(nodes.chain(&with_view).is_none());
}

#[test]
fn each_token_of_a_batch_has_rows_of_its_own() {
    let mut nodes = Nodes { n_tokens: 3, ..Nodes::default() };
    let (x, ids) = (nodes.leaf([8, 1]), nodes.leaf([2, 1]));
    let both = nodes.product(SliceKind::GateUp, 8, x, ids);
    let gate = nodes.view(both, llama::GGML_OP_VIEW, 4, 0);
    let up = nodes.view(both, llama::GGML_OP_VIEW, 4, 4);
    let glu = nodes.tensor(llama::GGML_OP_GLU, [4, 2], &[gate, up]);
    let down = nodes.product(SliceKind::Down, 8, glu, ids);
    let all = [both, gate, up, glu, down];
    let chain = nodes.chain(&all).expect("every node is row by row");
    // Six pairs: a copy of its token's input for each, then rows of 8, 4 and 8.
    assert_eq!(rows(&chain, 0, 1), (0, 8, 8));
    assert_eq!((chain.n_floats, chain.links[2].start), (6 * (8 + 8 + 4 + 8), 6 * (8 + 8 + 4)));
    assert_eq!(rows(&chain, 1, 1), (48 + 4, 8, 4));
    // Tokens with another stride than the whole tensor's are no part of its rows.
    // SAFETY: a node of these.
    unsafe { (*up).nb[2] /= 2 };
    assert!(nodes.chain(&all).is_none());
}

#[test]
fn halves_of_one_product_and_nodes_in_place_are_followed() {
    let mut nodes = Nodes::default();
    let (x, ids) = (nodes.leaf([8, 1]), nodes.leaf([2, 1]));
    let both = nodes.product(SliceKind::GateUp, 8, x, ids);
    let gate = nodes.view(both, llama::GGML_OP_VIEW, 4, 0);
    let up = nodes.view(both, llama::GGML_OP_VIEW, 4, 4);
    let glu = nodes.tensor(llama::GGML_OP_GLU, [4, 2], &[gate, up]);
    let down = nodes.product(SliceKind::Down, 8, glu, ids);
    let chain = nodes.chain(&[both, gate, up, glu, down]).expect("views of a result are parts of its rows");
    assert_eq!(rows(&chain, 1, 0), (8, 8, 4));
    assert_eq!(rows(&chain, 1, 1), (12, 8, 4));
    // Clamped in place: readers of the original get the clamped values.
    let clamped = nodes.view(both, llama::GGML_OP_CLAMP, 8, 0);
    let chain = nodes.chain(&[both, clamped, gate, up, glu, down]).expect("in place is row by row");
    assert_eq!(rows(&chain, 2, 1), (8 + 16 + 4, 8, 4));
    // After clamping one half, the other half is missing.
    let half = nodes.view(both, llama::GGML_OP_CLAMP, 4, 0);
    assert!(nodes.chain(&[both, half, gate, up, glu, down]).is_none());
}

#[test]
fn products_that_mix_rows_are_no_chain() {
    for op in [llama::GGML_OP_SOFT_MAX, llama::GGML_OP_CONT, llama::GGML_OP_MUL_MAT] {
        let mut nodes = Nodes::default();
        let (x, ids) = (nodes.leaf([8, 1]), nodes.leaf([2, 1]));
        let up = nodes.product(SliceKind::Up, 4, x, ids);
        let mixed = nodes.tensor(op, [4, 2], &[up]);
        let down = nodes.product(SliceKind::Down, 8, mixed, ids);
        assert!(nodes.chain(&[up, mixed, down]).is_none());
    }
    let mut nodes = Nodes::default();
    let (x, ids, scales) = (nodes.leaf([8, 1]), nodes.leaf([2, 1]), nodes.leaf([4, 2]));
    let up = nodes.product(SliceKind::Up, 4, x, ids);
    let scaled = nodes.tensor(llama::GGML_OP_MUL, [4, 2], &[up, scales]);
    let down = nodes.product(SliceKind::Down, 8, scaled, ids);
    assert!(nodes.chain(&[up, scaled, down]).is_none(), "what has rows of its own is not gathered");
}
