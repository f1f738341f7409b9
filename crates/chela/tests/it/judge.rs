//! `chela judge test` as a person runs it.

use std::{
    path::Path,
    process::{Command, Output},
};

fn judge_test(home: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chela"));
    command
        .args(["judge", "test", "--set", "judge.kinds=[\"rules\"]"])
        .arg("--model")
        .arg(home.join("model"))
        .args(arguments)
        .output()
        .unwrap()
}

fn home() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let spec = chela_model::testing::TinySpec::default();
    chela_model::testing::write_tiny_llama(&home.path().join("model"), 1, &spec).unwrap();
    home
}

fn turn(label: i64, said: &str) -> String {
    format!(
        r#"{{"label":{label},"tags":["t"],"messages":[{{"role":"user","content":"q"}}],"answer":{{"content":"a"}},"next":[{{"role":"user","content":"{said}"}}]}}"#
    )
}

#[test]
fn labelled_turns_of_a_file_are_judged() {
    let home = home();
    let file = home.path().join("turns.jsonl");
    let text = [
        turn(1, "Thanks!"),
        turn(-1, "No, that's wrong."),
        turn(-1, "Thanks, but no."),
        turn(0, "hm"),
    ];
    std::fs::write(&file, text.join("\n")).unwrap();
    let output = judge_test(home.path(), &["--json", &file.display().to_string()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let got: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        got["all"]["confusion"],
        serde_json::json!([[1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0]])
    );
    assert_eq!(got["all"]["opposite"], 1);
    assert_eq!(got["turns"][1]["judge"], "rules:rejected");
}

#[test]
fn what_is_no_set_of_turns_is_refused_before_anything_slow() {
    let home = home();
    let file = home.path().join("turns.jsonl");
    let good = turn(1, "ok");
    for (text, arguments, expected) in [
        (format!("{good}\n{{\"label\": 7}}"), &[][..], "line 2"),
        (String::new(), &[], "holds no turn"),
        (good, &["--tag", "absent"], "no turn has the tag absent"),
    ] {
        std::fs::write(&file, text).unwrap();
        let path = file.display().to_string();
        let arguments: Vec<&str> = arguments.iter().copied().chain([path.as_str()]).collect();
        let output = judge_test(home.path(), &arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected), "{said}");
    }
    let output = judge_test(home.path(), &["absent.jsonl"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(2) && said.contains("absent.jsonl"),
        "{said}"
    );
}
