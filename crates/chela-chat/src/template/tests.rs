//! Templates against what Transformers does with them.

use super::*;
use chela_core::{Tool, ToolCall};
use std::time::{Duration, UNIX_EPOCH};

fn encoder() -> Encoder {
    let model =
        r#"{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#;
    Encoder::new(tokenizers::Tokenizer::from_bytes(model).unwrap(), &[]).unwrap()
}

fn prepared(c: &Conversation) -> Prepared {
    Prepared::new(c, &encoder()).unwrap()
}

fn render(template: &str, c: &Conversation) -> Result<String, ChatError> {
    Template::new(template, Some("<s>"), None)?.render(&prepared(c), c.messages.len(), true)
}

fn ok(template: &str, c: &Conversation) -> String {
    render(template, c).unwrap()
}

fn says(messages: &[Message]) -> Conversation {
    Conversation {
        messages: messages.to_vec(),
        ..Conversation::default()
    }
}

fn with_tool(definition: &str) -> Conversation {
    let (name, definition) = ("f".to_owned(), definition.to_owned());
    Conversation {
        tools: vec![Tool { name, definition }],
        ..says(&[Message::user("x")])
    }
}

#[test]
fn tojson_is_pythons_and_keeps_wire_order() {
    let c = with_tool(
        r#"{"zeta":{"b":1,"a":[1,2.0,1e20,true,null]},"alpha":"<é&你'\"\\\n\u0001\u007f>","mid":{},"none":[]}"#,
    );
    let want = "{\"zeta\": {\"b\": 1, \"a\": [1, 2.0, 1e+20, true, null]}, \"alpha\": \"<é&你'\\\"\\\\\\n\\u0001\u{7f}>\", \"mid\": {}, \"none\": []}";
    assert_eq!(ok("{{ tools[0] | tojson }}", &c), want);
    let c = with_tool(r#"{"b":{"d":[1,{}],"c":"é🦀"},"a":0}"#);
    let indented = "{\n  \"b\": {\n    \"d\": [\n      1,\n      {}\n    ],\n    \"c\": \"é🦀\"\n  },\n  \"a\": 0\n}";
    let ascii = r#"{"b": {"d": [1, {}], "c": "\u00e9\ud83e\udd80"}, "a": 0}"#;
    let tight = r#"{"a":0,"b":{"c":"é🦀","d":[1,{}]}}"#;
    for (filter, want) in [
        ("tojson(indent=2)", indented),
        ("tojson(ensure_ascii=True)", ascii),
        ("tojson(sort_keys=true, separators=(',', ':'))", tight),
    ] {
        assert_eq!(ok(&format!("{{{{ tools[0] | {filter} }}}}"), &c), want);
    }
    assert!(render("{{ nothing | tojson }}", &c).is_err());
    assert!(render("{{ tools | tojson(color=1) }}", &c).is_err());
}

#[test]
fn maps_are_walked_in_wire_order() {
    let c = with_tool(r#"{"z":1,"b":{"y":2,"a":3},"c":4}"#);
    let template = "{% for k, v in tools[0].items() %}{{ k }}={{ v }};{% endfor %}{% for k in tools[0].b %}{{ k }}{% endfor %}";
    assert_eq!(ok(template, &c), "z=1;b={'y': 2, 'a': 3};c=4;ya");
}

#[test]
fn white_space_is_jinjas_with_trim_and_lstrip() {
    let c = says(&[Message::user("a"), Message::user("b")]);
    let template = "{% for m in messages %}\n    {% if loop.first %}\n[{{ m.content }}]\n    {% else %}\n({{ m.content }})\n    {% endif %}\n{% endfor %}\n";
    assert_eq!(ok(template, &c), "[a]\n(b)\n");
    let template = "{%- for m in messages -%} {%- if m.content == 'b' %}{% break %}{% endif -%} {{ m.content }} {%- endfor -%} !";
    assert_eq!(ok(template, &c), "a!");
}

#[test]
fn generation_marks_are_read_over() {
    let c = says(&[Message::assistant("a")]);
    let plain = "x{% with %}\n  {{ messages[0].content }}\n{% endwith %}\ny";
    for marked in [
        "x{% generation %}\n  {{ messages[0].content }}\n{% endgeneration %}\ny",
        "x{%generation%}\n  {{ messages[0].content }}\n{%endgeneration%}\ny",
    ] {
        assert_eq!(ok(marked, &c), ok(plain, &c));
    }
    let tight = "x {%- generation -%}\n {{ messages[0].content }} {%- endgeneration -%} y";
    assert_eq!(ok(tight, &c), "xay");
}

#[test]
fn absent_things_are_absent() {
    let c = says(&[Message::assistant("")]);
    let template = "[{{ messages[0].content }}{{ messages[0].name }}{{ messages[0].tool_calls }}{{ tools }}{{ documents }}{{ eos_token }}{{ none }}]{{ bos_token }}";
    assert_eq!(ok(template, &c), "[]<s>");
    let template = "{% if tools is defined and not tools %}as Transformers{% endif %}";
    assert_eq!(ok(template, &c), "as Transformers");
}

#[test]
fn calls_and_results_reach_the_template() {
    let calls = |arguments: &str| {
        let (id, name) = ("c1".to_owned(), "f".to_owned());
        let arguments = arguments.to_owned();
        Message {
            tool_calls: vec![ToolCall {
                id,
                name,
                arguments,
            }],
            reasoning: Some("why".to_owned()),
            ..Message::assistant("")
        }
    };
    let result = Message {
        tool_call_id: Some("c1".to_owned()),
        ..Message::text(Role::Tool, "42")
    };
    let template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{% for t in m.tool_calls %}{{ t.type }},{{ t.id }},{{ t.function.name }},{{ t.function.arguments | tojson }},{{ t.function.arguments.b }}{% endfor %}{{ m.tool_call_id }}{{ m.content }};{% endfor %}";
    let c = says(&[calls(r#"{"b":1,"a":{}}"#), result]);
    let want = r#"assistant:whyfunction,c1,f,{"b": 1, "a": {}},1;tool:c142;"#;
    assert_eq!(ok(template, &c), want);
    assert!(ok(template, &says(&[calls("")])).contains("f,{},"));
    // Broken JSON comes back as the text it is, as with Transformers.
    let broken = ok(template, &says(&[calls("{oops")]));
    assert!(broken.contains(r#"f,"{oops","#), "{broken}");
}

#[test]
fn template_args_reach_the_template_and_replace_nothing_of_ours() {
    let args = |text: &str| Conversation {
        template_args: Some(text.to_owned()),
        ..says(&[Message::user("u")])
    };
    let template = "{{ enable_thinking }}{{ messages | length }}{{ add_generation_prompt }}{{ bos_token }}{{ tools }}";
    let c = args(
        r#"{"enable_thinking":false,"messages":[],"add_generation_prompt":false,"bos_token":"x","tools":[1]}"#,
    );
    assert_eq!(ok(template, &c), "False1True<s>");
    for bad in ["[]", "{", "1"] {
        let read = Prepared::new(&args(bad), &encoder());
        assert!(matches!(read, Err(ChatError::Json { .. })));
    }
}

#[test]
fn system_messages_are_joined_only_where_the_template_refuses() {
    let strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    let c = says(&[
        Message::system("a"),
        Message::user("u"),
        Message::system("b"),
    ]);
    assert_eq!(ok(strict, &c), "[system:a\n\nb][user:u]");
    let lax = "{% for m in messages %}{{ m.content }}{% endfor %}";
    assert_eq!(ok(lax, &c), "aub");
    let t = Template::new(strict, None, None).unwrap();
    let first = t.render(&prepared(&c), 2, true).unwrap();
    assert_eq!(first, "[system:a][user:u]");
}

#[test]
fn failures_say_what_and_where() {
    let c = says(&[Message::user("u")]);
    let template = "{% macro m() %}{{ raise_exception('roles: no') }}{% endmacro %}\n{{ m() }}";
    let raised = render(template, &c);
    assert_eq!(raised, Err(ChatError::Refused("roles: no".to_owned())));
    let failed = render("a\nb\n{{ nothing.at.all }}", &c).unwrap_err();
    assert!(failed.to_string().contains("line 3"), "{failed}");
    let Err(ChatError::Template(text)) = Template::new("a\n{% if %}", None, None) else {
        panic!("it was taken");
    };
    assert!(text.starts_with("line 2: "), "{text}");
}

#[test]
fn the_clock_is_injected() {
    let c = says(&[Message::user("u")]);
    let mut t = Template::new("{{ strftime_now('%d %b %Y') }}", None, None).unwrap();
    t.set_clock(Arc::new(|| UNIX_EPOCH + Duration::from_secs(86_400 * 59)));
    assert_eq!(t.render(&prepared(&c), 1, true).unwrap(), "01 Mar 1970");
    assert!(render("{{ strftime_now('%Q') }}", &c).is_err());
}

proptest::proptest! {
    /// A template that somebody put into a file may be anything: it is refused or rendered, and nothing breaks.
    #[test]
    fn any_template_is_refused_or_rendered(
        source in "(\\{% (for m in messages|if m|endif|endfor|set x = m|macro f\\(\\)|endmacro|generation|endgeneration|break) %\\}|\\{\\{ (m.content|messages\\[0\\]|m.role \\| upper|x\\[-1:\\]|tools \\| tojson\\(indent=2\\)|raise_exception\\('no'\\)|strftime_now\\('%Y'\\)|1 // 0|'a' \\* 9) \\}\\}|[a-z界<|{}% ]){0,10}",
    ) {
        if let Ok(template) = Template::new(&source, Some("<s>"), None) {
            let c = says(&[Message::user("u"), Message::assistant("a")]);
            let prepared = Prepared::new(&c, &encoder()).unwrap();
            // Either is fine.
            let _ = template.render(&prepared, 2, true);
        }
    }
}
