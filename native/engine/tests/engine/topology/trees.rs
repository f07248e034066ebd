//! Unpacks recorded machines into folders that look like `/sys`.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::Path,
    sync::{Mutex, PoisonError},
};

use fabric_engine::topology::Topology;

use crate::TestFolder;

/// A recorded machine, by the name of its file. Each is unpacked once: it makes a thousand files.
pub fn machine(name: &str) -> Topology {
    static READ: Mutex<BTreeMap<String, Topology>> = Mutex::new(BTreeMap::new());
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    read.entry(name.to_owned()).or_insert_with(|| unpacked(name)).clone()
}

fn unpacked(name: &str) -> Topology {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/engine/topology/trees").join(name);
    let text = fs::read_to_string(file.with_file_name(format!("{name}.tree")));
    tree(&text.unwrap_or_else(|e| panic!("{name}.tree: {e}")))
}

/// A machine described in the test itself.
pub fn tree(text: &str) -> Topology {
    let folder = TestFolder::new();
    text.lines().for_each(|line| unpack(&folder.0, line));
    Topology::read(&folder.0).expect("a tree of sysfs")
}

fn unpack(root: &Path, line: &str) {
    if line.is_empty() || line.starts_with('#') {
        return;
    }
    if let Some((link, target)) = line.split_once(" -> ") {
        let link = root.join(link);
        fs::create_dir_all(link.parent().expect("a path inside the tree")).expect("its folder");
        symlink(target, link).expect("a link");
        return;
    }
    let (folder, files) = line.split_once(" | ").unwrap_or_else(|| panic!("bad line: {line}"));
    let folder = root.join(folder);
    fs::create_dir_all(&folder).expect("a folder");
    let mut rest = files.trim_start();
    while let Some((name, value)) = rest.split_once('=') {
        let (value, after) = match value.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').expect("a closing quote"),
            None => value.split_once(' ').unwrap_or((value, "")),
        };
        fs::write(folder.join(name), format!("{value}\n")).expect("a file");
        rest = after.trim_start();
    }
}
