use super::*;

fn set(files: &[(&str, &str)]) -> Files {
    let file = |data: &str| File {
        data: data.as_bytes().to_vec(),
        mode: 0o640,
    };
    files
        .iter()
        .map(|(path, data)| ((*path).to_owned(), file(data)))
        .collect()
}

#[test]
fn file_volumes_switch_all_at_once_and_leave_no_old_files() {
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path();
    write_files(volume, &set(&[("a", "1"), ("sub/b", "2")]), None).unwrap();
    let read = |path: &str| fs::read_to_string(volume.join(path)).ok();
    assert_eq!(
        (read("a").as_deref(), read("sub/b").as_deref()),
        (Some("1"), Some("2"))
    );
    let mode = fs::metadata(volume.join("a")).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o640);
    let first = fs::read_link(volume.join(CURRENT)).unwrap();

    write_files(volume, &set(&[("a", "1"), ("sub/b", "2")]), None).unwrap();
    assert_eq!(
        fs::read_link(volume.join(CURRENT)).unwrap(),
        first,
        "no change, no switch"
    );

    write_files(volume, &set(&[("a", "9"), ("c", "3")]), None).unwrap();
    assert_eq!(
        (read("a").as_deref(), read("c").as_deref()),
        (Some("9"), Some("3"))
    );
    assert_eq!(read("sub/b"), None);
    let mut names: Vec<String> = fs::read_dir(volume)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["..data", "..v1", "a", "c"]);
}

#[test]
fn a_token_that_did_not_come_along_stays() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &set(&[("token", "t"), ("a", "1")]), None).unwrap();
    let mut next = set(&[("a", "2")]);
    keep_file(dir.path(), "token", &mut next);
    keep_file(dir.path(), "none", &mut next);
    keep_file(dir.path(), "../x", &mut next);
    assert_eq!(next, set(&[("token", "t"), ("a", "2")]));
}

#[test]
fn sub_paths_do_not_leave_the_volume() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("volume");
    fs::create_dir(&base).unwrap();
    symlink("/etc", base.join("out")).unwrap();
    assert!(
        sub_path(&base, "new/dir", true)
            .unwrap()
            .ends_with("volume/new/dir")
    );
    assert!(sub_path(&base, "../x", true).is_err());
    assert!(
        sub_path(&base, "out", false).is_err(),
        "a link out of the volume"
    );
    assert!(sub_path(&base, "gone", false).is_err());
}

#[test]
fn host_path_types_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let check = |name: &str, kind: &str| {
        let path = dir.path().join(name).to_string_lossy().into_owned();
        host_path(
            &Volume::default(),
            &HostPath {
                path,
                r#type: kind.into(),
            },
        )
    };
    assert!(check("none", "").is_ok());
    assert!(check("none", "Directory").is_err());
    assert!(check("made", "DirectoryOrCreate").is_ok());
    assert!(check("made", "Directory").is_ok());
    assert!(check("made", "File").is_err());
    assert!(check("file", "FileOrCreate").is_ok());
    assert!(check("file", "File").is_ok());
    assert!(check("file", "Nonsense").is_err());
}

#[test]
fn the_last_status_survives() {
    let dir = tempfile::tempdir().unwrap();
    let node = NodeFacts {
        pods_dir: dir.path().into(),
        ..NodeFacts::default()
    };
    assert_eq!(load_status(&node, "u"), None);
    save_status(&node, "u", b"one").unwrap();
    save_status(&node, "u", b"two").unwrap();
    assert_eq!(load_status(&node, "u").as_deref(), Some(&b"two"[..]));
    assert_eq!(known_pods(&node), ["u"]);
    remove(&node, "u", &dir.path().join("logs")).unwrap();
    assert!(known_pods(&node).is_empty());
    assert!(remove(&node, "../u", &dir.path().join("logs")).is_err());
}

#[test]
fn termination_messages_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    fs::write(&path, "x".repeat(10_000)).unwrap();
    let message = termination_message(path.to_str().unwrap());
    assert_eq!(message.len() as u64, MAX_TERMINATION_MESSAGE);
    assert_eq!(termination_message("/nonexistent"), "");
}
