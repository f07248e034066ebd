use super::*;

/// A sysfs tree in a temporary folder.
struct SysfsTree(PathBuf);

impl SysfsTree {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("fr-sysfs-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    fn port(&self, device: &str, state: &str, layer: &str, gids: &[(&str, &str)]) -> &Self {
        let at = self.0.join(device).join("ports/1");
        for d in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
            fs::create_dir_all(at.join(d)).unwrap();
        }
        fs::write(at.join("state"), format!("{state}\n")).unwrap();
        fs::write(at.join("link_layer"), format!("{layer}\n")).unwrap();
        fs::write(at.join("lid"), if layer == "InfiniBand" { "0x1c\n" } else { "0x0\n" }).unwrap();
        for (i, (gid, kind)) in gids.iter().enumerate() {
            let i = i.to_string();
            fs::write(at.join("gids").join(&i), format!("{gid}\n")).unwrap();
            fs::write(at.join("gid_attrs/types").join(&i), format!("{kind}\n")).unwrap();
            fs::write(at.join("gid_attrs/ndevs").join(&i), "eth0\n").unwrap();
        }
        self
    }

    fn survey(&self, config: &NicConfig) -> (Vec<DeviceReport>, Vec<ChosenPort>) {
        survey(&self.0, config, &|usable| Ok(usable.to_vec()))
    }
}

impl Drop for SysfsTree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const ZERO: &str = "0000:0000:0000:0000:0000:0000:0000:0000";
const LOCAL: &str = "fe80:0000:0000:0000:0000:00ff:fe00:0001";
const V4: &str = "0000:0000:0000:0000:0000:ffff:0a4d:0001";
const V6: &str = "fd00:0000:0000:0000:0000:0000:0000:0001";

fn names(chosen: &[ChosenPort]) -> Vec<&str> {
    chosen.iter().map(|c| c.device.as_str()).collect()
}

#[test]
fn the_gid_that_is_routed_is_preferred() {
    let (v1, v2) = ("IB/RoCE v1", "RoCE v2");
    type Table<'a> = (&'a [(&'a str, &'a str)], Option<u8>);
    let tables: [Table<'_>; 5] = [
        (&[(LOCAL, v1), (LOCAL, v2), (V4, v1), (V4, v2), (ZERO, v2)], Some(3)),
        (&[(LOCAL, v1), (LOCAL, v2), (V6, v2)], Some(2)),
        (&[(LOCAL, v1), (LOCAL, v2)], Some(1)),
        (&[(LOCAL, v1), (V4, v1)], None),
        (&[(ZERO, v2)], None),
    ];
    for (i, (gids, expected)) in tables.into_iter().enumerate() {
        let tree = SysfsTree::new(&format!("gid{i}"));
        tree.port("mlx5_0", "4: ACTIVE", "Ethernet", gids);
        let (reports, chosen) = tree.survey(&NicConfig::default());
        assert_eq!(chosen.first().map(|c| c.gid_index), expected, "table {i}");
        let told = reports[0].gids.iter().find(|g| g.chosen).map(|g| g.index);
        assert_eq!(told, expected);
        assert!(reports[0].gids.iter().all(|g| !g.why.is_empty()));
        if expected.is_none() {
            assert!(!reports[0].why.is_empty() && !reports[0].chosen);
        }
    }
    let tree = SysfsTree::new("asked");
    tree.port("mlx5_0", "4: ACTIVE", "Ethernet", &[(LOCAL, v1), (V4, v2)]);
    let asked = |i| NicConfig { gid_index: Some(i), ..Default::default() };
    let (_, chosen) = tree.survey(&asked(0));
    assert_eq!((chosen[0].gid_index, chosen[0].fabric), (0, Fabric::RoceV1));
    let (reports, chosen) = tree.survey(&asked(7));
    assert!(chosen.is_empty() && reports[0].why.contains("index 7"), "{}", reports[0].why);
}

#[test]
fn each_unused_port_has_a_reason() {
    let tree = SysfsTree::new("why");
    let v2 = [(V4, "RoCE v2")];
    tree.port("mlx5_0", "4: ACTIVE", "Ethernet", &v2)
        .port("mlx5_1", "1: DOWN", "Ethernet", &v2)
        .port("mlx5_2", "4: ACTIVE", "InfiniBand", &[(LOCAL, "IB/RoCE v1")])
        .port("mlx5_10", "4: ACTIVE", "Ethernet", &v2);
    let (_, chosen) = tree.survey(&NicConfig::default());
    assert_eq!(names(&chosen), ["mlx5_0", "mlx5_2", "mlx5_10"]);
    assert_eq!((chosen[1].fabric, chosen[1].lid), (Fabric::Infiniband, 0x1c));
    let config = NicConfig {
        names: vec!["mlx5_1?".into(), "mlx5_0:1".into(), "mlx5_*".into()],
        max_rails: 2,
        ..Default::default()
    };
    let (reports, chosen) = tree.survey(&config);
    assert_eq!(names(&chosen), ["mlx5_10", "mlx5_0"]);
    let why = |i: usize| reports[i].why.as_str();
    assert!(why(0).starts_with("rail 1") && why(1).contains("DOWN"), "{reports:?}");
    assert!(why(2).contains("2 rails are in use"), "{}", why(2));
    assert!(summary(&reports).contains("mlx5_1 port 1: the port is DOWN"));
    let config = NicConfig { names: vec!["mlx5_0".into()], ..Default::default() };
    let (reports, _) = tree.survey(&config);
    assert!(reports[2].why.contains("no name or pattern"), "{}", reports[2].why);
    assert!(summary(&[]).contains("no RDMA device"));
    let patterns = ["mlx5_1".into(), "mlx4*".into(), "mlx5_0:1".into(), "mlx5_0:2".into()];
    assert_eq!(unmatched_patterns(&reports, &patterns).collect::<Vec<_>>(), ["mlx4*", "mlx5_0:2"]);
    let far = |_: &[String]| Err(DomainError::Unavailable("no NIC is near that GPU".into()));
    let (reports, chosen) = survey(&tree.0, &NicConfig::default(), &far);
    assert!(chosen.is_empty() && reports[0].why.contains("near that GPU"), "{reports:?}");
}
