//! scratch
#[test]
#[ignore = "scratch"]
fn dump() {
    let path = std::path::PathBuf::from(std::env::var("DUMP").unwrap());
    let m = chela_model::Model::open(&chela_model::ModelFiles{name:"x".into(), layout: chela_model::Layout::Gguf(path)}).unwrap();
    for n in m.config().tensor_names() {
        if let chela_model::TensorName::Layer(l, _) = n { if l != 0 && l != 5 { continue } }
        let t = m.tensor(n).unwrap(); let v = t.to_f32();
        let s: f64 = v.iter().map(|x| f64::from(*x)).sum();
        let w: f64 = v.iter().enumerate().map(|(i, x)| f64::from(*x) * ((i % 1009) as f64)).sum();
        println!("D {} {s:.6} {w:.4}", n.gguf());
    }
    let t = m.tokenizer().unwrap();
    for text in serde_json::from_str::<Vec<String>>(&std::fs::read_to_string("/tmp/texts.json").unwrap()).unwrap() {
        println!("T {:?}", t.encode(text, false).unwrap().get_ids());
    }
}
