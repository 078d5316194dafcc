//! What is kept where: what is read, and what is refused.

use std::path::PathBuf;

use zero_core::{Bytes, ConfigError, Offload, Placement, Stage, Tier, ZeroConfig};

/// The message about a TOML text that has to be refused.
fn refusal(text: &str) -> String {
    ZeroConfig::from_toml(text).unwrap_err().to_string()
}

#[test]
fn a_key_of_an_inner_table_is_found_by_every_spelling() {
    let optimizer = Placement { tier: Tier::Host, fraction: 0.5, ..Placement::default() };
    let offload = Offload { optimizer, ..Offload::default() };
    let expected = ZeroConfig { offload, ..ZeroConfig::default() };
    for text in [
        "[offload.optimizer]\ntier = \"host\"\nfraction = 0.5",
        "[offload]\noptimizer = { tier = \"host\", fraction = 0.5 }",
        "offload.optimizer.tier = \"host\"\noffload.optimizer.fraction = 0.5",
        "\"offload.optimizer\" = { tier = \"host\", fraction = 0.5 }",
    ] {
        assert_eq!(ZeroConfig::from_toml(text).unwrap(), expected, "{text}");
    }
    for text in [
        r#"{"offload": {"optimizer": {"tier": "host", "fraction": 0.5}}}"#,
        r#"{"offload": {"optimizer.tier": "host", "optimizer": {"fraction": 0.5}}}"#,
        r#"{"offload.optimizer": {"tier": "host"}, "offload.optimizer.fraction": 0.5}"#,
        r#"{"offload.optimizer.tier": "host", "offload": {"optimizer.fraction": 0.5, "gradients": null}}"#,
    ] {
        assert_eq!(ZeroConfig::from_json(text).unwrap(), expected, "{text}");
    }
    for text in [
        r#"{"offload": {"optimizer": {"tier": "host"}, "optimizer.tier": "host"}}"#,
        r#"{"offload": {"optimizer": {}}, "offload.optimizer": {}}"#,
        r#"{"offload.optimizer.tier": "host", "offload": {"optimizer": {"tier": "host"}}}"#,
    ] {
        let error = ZeroConfig::from_json(text).unwrap_err();
        assert!(matches!(error, ConfigError::DuplicateKey { .. }), "{error}");
    }
}

#[test]
fn an_unknown_key_of_an_inner_table_is_refused_with_the_nearest_known_one() {
    assert_eq!(
        refusal("[offload.optimizer]\nteir = \"host\""),
        "unknown key `offload.optimizer.teir`; did you mean `offload.optimizer.tier`?"
    );
    for text in ["[offload.optimiser]\ntier = \"host\"", "\"offload.optimiser.tier\" = \"host\""] {
        assert!(refusal(text).ends_with("; did you mean `offload.optimizer`?"), "{}", refusal(text));
    }
    assert_eq!(refusal("[ofload.optimizer]\ntier = 1"), "unknown key `ofload`; did you mean `offload`?");
    assert_eq!(
        refusal("[offload]\nwarp_drive = 1"),
        "unknown key `offload.warp_drive`; known keys are offload.buffer_bytes, offload.block_bytes, offload.depth, \
         offload.delayed_update, offload.exact_steps, offload.optimizer, offload.gradients, offload.parameters"
    );
    assert_eq!(
        refusal("offload.optimizer = \"nvme\""),
        "`offload.optimizer` is the string \"nvme\"; write a table"
    );
    assert_eq!(
        refusal("offload.optimizer.tier = \"cpu\""),
        "`offload.optimizer.tier` is the string \"cpu\"; it must be \"device\", \"host\", \"nvme\" or \"auto\""
    );
    assert_eq!(
        refusal("offload.optimizer.path = 1"),
        "`offload.optimizer.path` is the integer 1; write a string"
    );
}

#[test]
fn numbers_that_no_disk_works_with_are_refused() {
    for bytes in ["0", "4095", "5000", "2147483648"] {
        let message = refusal(&format!("offload.block_bytes = {bytes}"));
        assert!(message.ends_with("; it must be a power of two from 4096 to 1073741824"), "{message}");
    }
    for depth in ["0", "4097"] {
        let message = refusal(&format!("offload.depth = {depth}"));
        assert_eq!(message, format!("`offload.depth` is {depth}; it must be at least 1 and at most 4096"));
    }
    assert_eq!(
        refusal("[offload]\nbuffer_bytes = 12287\nblock_bytes = 4096"),
        "offload.buffer_bytes is 12.0 KiB, which has no room for three transfers of offload.block_bytes, 4.0 KiB; raise \
         the first or lower the second"
    );
    ZeroConfig::from_toml("[offload]\nbuffer_bytes = 12288\nblock_bytes = 4096").unwrap();
    for kind in ["optimizer", "gradients", "parameters"] {
        for fraction in ["-0.1", "1.5", "nan", "inf"] {
            let message = refusal(&format!("[offload.{kind}]\ntier = \"host\"\nfraction = {fraction}"));
            assert!(message.starts_with(&format!("`offload.{kind}.fraction` is ")), "{message}");
            assert!(message.ends_with("; it must be from 0 to 1"), "{message}");
        }
    }
    let most = Offload { exact_steps: u64::MAX, ..Offload::default() };
    let error = ZeroConfig { offload: most, ..ZeroConfig::default() }.validate().unwrap_err();
    assert!(error.to_string().starts_with("`offload.exact_steps` is 18446744073709551615"), "{error}");
}

/// What is said of a key that is set where it has no meaning.
fn needless(key: &str, needs: &str) -> String {
    format!("`{key}` is set, but it has a meaning only with {needs}; set that, or remove `{key}`")
}

#[test]
fn a_disk_needs_a_path_and_nothing_else_takes_one() {
    for kind in ["optimizer", "gradients", "parameters"] {
        let states = match kind {
            "parameters" => "[offload.optimizer]\ntier = \"nvme\"\npath = \"/states\"\n",
            _ => "",
        };
        let of = |rest: &str| format!("precision.compute = \"bf16\"\n{states}[offload.{kind}]\n{rest}");
        assert_eq!(
            refusal(&of("tier = \"nvme\"")),
            format!(
                "`offload.{kind}.path` is not set, but the tier is \"nvme\"; write path = \"/nvme\", a directory on the \
                 disk to use"
            )
        );
        for tier in ["device", "host"] {
            assert_eq!(
                refusal(&of(&format!("tier = \"{tier}\"\npath = \"/nvme\""))),
                needless(&format!("offload.{kind}.path"), "a tier of \"nvme\" or \"auto\"")
            );
        }
        for tier in ["nvme", "auto"] {
            let message = refusal(&of(&format!("tier = \"{tier}\"\npath = \"\"")));
            assert!(message.ends_with("; it must be the name of a directory, in UTF-8"), "{message}");
            ZeroConfig::from_toml(&of(&format!("tier = \"{tier}\"\npath = \"/nvme\""))).unwrap();
        }
        for tier in ["device", "auto"] {
            assert_eq!(
                refusal(&of(&format!("tier = \"{tier}\"\nfraction = 0.5"))),
                needless(&format!("offload.{kind}.fraction"), "a tier of \"host\" or \"nvme\"")
            );
            ZeroConfig::from_toml(&of(&format!("tier = \"{tier}\"\nfraction = 1"))).unwrap();
        }
    }
}

#[test]
fn directories_may_differ() {
    let elsewhere = "offload.optimizer = { tier = \"nvme\", path = \"/a\" }\n\
                     offload.gradients = { tier = \"nvme\", path = \"/b\" }";
    ZeroConfig::from_toml(elsewhere).unwrap();
}

#[test]
fn no_more_masters_are_on_a_disk_than_states() {
    let with = |optimizer: &str, fraction: f64| {
        let text = format!(
            "precision.compute = \"bf16\"\noffload.optimizer = {{ {optimizer} }}\n\
             offload.parameters = {{ tier = \"nvme\", path = \"/masters\", fraction = {fraction} }}"
        );
        ZeroConfig::from_toml(&text)
    };
    let half = "tier = \"nvme\", path = \"/states\", fraction = 0.5";
    for fraction in [0.0, 0.25, 0.5] {
        with(half, fraction).unwrap();
    }
    with("tier = \"host\"", 0.0).unwrap();
    for (optimizer, fraction) in [
        (half, 0.51),
        (half, 1.0),
        ("tier = \"host\"", 1.0),
        ("", 0.1),
        ("tier = \"auto\", path = \"/a\"", 1.0),
    ] {
        let error = with(optimizer, fraction).unwrap_err();
        assert!(matches!(error, ConfigError::MastersBeyondStates), "{optimizer} {fraction}: {error}");
        assert!(error.to_string().ends_with("with the tier \"nvme\", or leave both to \"auto\""), "{error}");
    }
}

#[test]
fn masters_that_are_shards_stay_on_the_device() {
    for (tier, path) in [("host", ""), ("nvme", "path = \"/nvme\"\n")] {
        let text = format!("[offload.parameters]\ntier = \"{tier}\"\n{path}fraction = 0.5");
        assert_eq!(
            refusal(&text),
            format!(
                "offload.parameters.tier is \"{tier}\", but precision.compute is \"f32\", so that the shards that ranks \
                 read from each other are the masters themselves; it helps in 16 bits: choose \"bf16\" or \"f16\", or \
                 remove the tier"
            )
        );
    }
    let text = "[offload.parameters]\ntier = \"host\"\nfraction = 0.5";
    for dtype in ["bf16", "f16"] {
        ZeroConfig::from_toml(&format!("precision.compute = \"{dtype}\"\n{text}")).unwrap();
    }
    ZeroConfig::from_toml("offload.parameters = { tier = \"auto\", path = \"/nvme\" }").unwrap();
}

#[test]
fn gradients_go_to_a_disk_if_they_are_reduced_in_every_backward() {
    let text = "[offload.gradients]\ntier = \"nvme\"\npath = \"/nvme\"";
    let refused = "offload.gradients.tier is \"nvme\", but gradients are reduced at the step, so that whole gradients \
                   would wait in memory; set reduce_gradients = \"every-backward\", or remove the tier";
    for stage in Stage::ALL.map(Stage::number) {
        let with = |entries: &str| format!("stage = {stage}\n{entries}\n{text}");
        assert_eq!(refusal(&with("reduce_gradients = \"at-step\"")), refused);
        ZeroConfig::from_toml(&with("reduce_gradients = \"every-backward\"")).unwrap();
        match stage {
            0 | 1 => assert_eq!(refusal(&with("")), refused),
            _ => assert_eq!(ZeroConfig::from_toml(&with("")).unwrap().stage.number(), stage),
        }
        ZeroConfig::from_toml(&format!("stage = {stage}\noffload.gradients.tier = \"host\"")).unwrap();
    }
}

#[test]
fn how_things_move_may_be_said_where_nothing_does() {
    let text = "[offload]\nbuffer_bytes = 65536\nblock_bytes = 4096\ndepth = 1\ndelayed_update = true\nexact_steps = 0";
    for stage in Stage::ALL {
        let offload = ZeroConfig::from_toml(&format!("stage = {}\n{text}", stage.number())).unwrap().offload;
        assert_eq!((offload.buffer_bytes, offload.depth), (Bytes::new(65536), 1));
        assert!(offload.delayed_update && offload.exact_steps == 0);
    }
}

#[test]
fn a_path_of_odd_characters_is_written_as_toml() {
    let path = "/n\u{1}v\"m\\e\n\u{7f}\u{200b}\u{e9}'";
    let optimizer = Placement { tier: Tier::Nvme, path: Some(path.into()), fraction: 1.0 };
    let offload = Offload { optimizer, ..Offload::default() };
    let config = ZeroConfig { offload, ..ZeroConfig::default() };
    assert_eq!(ZeroConfig::from_toml(&config.to_toml()).unwrap(), config);
}

#[cfg(unix)]
#[test]
fn a_path_that_no_file_can_say_is_refused() {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    let path = PathBuf::from(OsString::from_vec(vec![b'/', 0xff]));
    let optimizer = Placement { tier: Tier::Nvme, path: Some(path), fraction: 1.0 };
    let offload = Offload { optimizer, ..Offload::default() };
    let error = ZeroConfig { offload, ..ZeroConfig::default() }.validate().unwrap_err();
    assert!(error.to_string().starts_with("`offload.optimizer.path` is \"/\\xFF\"; it must be"), "{error}");
}

#[test]
fn a_fraction_of_a_shard_is_rounded_up() {
    let kept = |tier, fraction| Placement { tier, path: None, fraction }.elements(7);
    assert_eq!([0.0, 0.1, 0.5, 1.0].map(|fraction| kept(Tier::Nvme, fraction)), [0, 1, 4, 7]);
    assert_eq!(kept(Tier::Host, 0.5), 4);
    assert_eq!([Tier::Device, Tier::Auto].map(|tier| kept(tier, 1.0)), [0, 0]);
}
